// What stands around recurrent layers and gated attention: norms of heads with a gate, heads without their gates, and gates.
#include "recurrent/values.cuh"

namespace recurrent {

constexpr int THREADS = 128, PARTS = HOST_MOST_SIZE / WIDTH, OWN = HOST_MOST_SIZE / THREADS;
constexpr int WIDE = 256, WIDE_PARTS = HOST_MOST_GROUP_SIZE / (4 * WIDE);
static_assert(THREADS == HOST_GATES_THREADS && WIDE == HOST_WIDE_THREADS, "the host makes the grids");

// Grid: heads, tokens, sequences. Each group of lanes adds up the whole head; a thread puts out one element of it, or two. All
// that is read is under way before the sum is awaited, and there is little code: a decode step comes to it with a cold cache.
template <class Gate, class Compute>
__global__ void __launch_bounds__(THREADS) gated_norm(const __grid_constant__ GatedNormArguments a) {
    const size_t row = size_t(blockIdx.z) * a.T + blockIdx.y;
    const unsigned begin = blockIdx.x * a.E;
    const float* head = a.value + row * a.O + begin;
    float4 values[PARTS];
    float own[OWN], weights[OWN], gates[OWN];
    launch_next_kernel();
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const unsigned element = threadIdx.x + i * THREADS;
        if (element < a.E) weights[i] = to_float(__ldg(reinterpret_cast<const Compute*>(a.norm.weight) + element));
    }
    wait_for_previous_kernel();
    load_vector(head, threadIdx.x % LANES, a.E, values);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const unsigned element = threadIdx.x + i * THREADS;
        if (element >= a.E) break;
        own[i] = __ldcg(head + element);
        gates[i] = loaded<Gate>(a.gate, row * a.V + a.norm.first + begin + element);
    }
    const float mean = __fdiv_rn(sum_of_lanes(share(values, values)), float(a.E));
    const float factor = reciprocal_root(mean + float(a.norm.epsilon));
    Compute* output = reinterpret_cast<Compute*>(a.output) + row * a.O + begin;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const unsigned element = threadIdx.x + i * THREADS;
        if (element < a.E) output[element] = rounded<Compute>(own[i] * factor * weights[i] * portable_silu(gates[i]));
    }
}

// Of a row's `size` columns, times SiLU of their gates, four neighbours of every 4 * WIDE that a thread has.
template <class Gate>
__device__ __forceinline__ void load_gated(const float* values, const char* gate, size_t gates, unsigned size,
                                           float4 (&own)[WIDE_PARTS]) {
#pragma unroll
    for (int part = 0; part < WIDE_PARTS; ++part) {
        const unsigned element = 4 * (part * WIDE + threadIdx.x);
        own[part] = make_float4(0, 0, 0, 0);
        if (element >= size) continue;
        own[part] = __ldcg(reinterpret_cast<const float4*>(values + element));
        own[part].x *= portable_silu(loaded<Gate>(gate, gates + element));
        own[part].y *= portable_silu(loaded<Gate>(gate, gates + element + 1));
        own[part].z *= portable_silu(loaded<Gate>(gate, gates + element + 2));
        own[part].w *= portable_silu(loaded<Gate>(gate, gates + element + 3));
    }
}

// The sum of the squares of what all threads have, to each of them: that of `ordered_sum` with so many lanes.
__device__ __forceinline__ float sum_of_squares(const float4 (&own)[WIDE_PARTS], float* sums) {
    sums[threadIdx.x] = share(own, own);
    for (unsigned half = WIDE / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    return sums[0];
}

template <class Compute>
__device__ __forceinline__ void store_normed(const float4 (&own)[WIDE_PARTS], float factor, const Compute* weights,
                                             unsigned size, Compute* output) {
#pragma unroll
    for (int part = 0; part < WIDE_PARTS; ++part) {
        const unsigned element = 4 * (part * WIDE + threadIdx.x);
        if (element >= size) continue;
        output[element] = rounded<Compute>(own[part].x * factor * to_float(__ldg(weights + element)));
        output[element + 1] = rounded<Compute>(own[part].y * factor * to_float(__ldg(weights + element + 1)));
        output[element + 2] = rounded<Compute>(own[part].z * factor * to_float(__ldg(weights + element + 2)));
        output[element + 3] = rounded<Compute>(own[part].w * factor * to_float(__ldg(weights + element + 3)));
    }
}

// Grid: groups, tokens, sequences.
template <class Gate, class Compute>
__global__ void __launch_bounds__(WIDE) gated_group_norm(const __grid_constant__ GatedGroupNormArguments a) {
    __shared__ float sums[WIDE];
    const unsigned size = a.O / a.norm.groups, begin = blockIdx.x * size;
    const size_t row = size_t(blockIdx.z) * a.T + blockIdx.y;
    const float* values = a.value + row * a.O + begin;
    const size_t gates = row * a.V + a.norm.first + begin;
    float4 own[WIDE_PARTS];
    launch_next_kernel();
    wait_for_previous_kernel();
    load_gated<Gate>(values, a.gate, gates, size, own);
    const float mean = __fdiv_rn(sum_of_squares(own, sums), float(size));
    const Compute* weights = reinterpret_cast<const Compute*>(a.norm.weight) + begin;
    Compute* output = reinterpret_cast<Compute*>(a.output) + row * a.O + begin;
    store_normed(own, reciprocal_root(mean + float(a.norm.epsilon)), weights, size, output);
}

// Grid: 1, tokens, sequences. The sum of a rank's own of a part that ranks share; zeros at the places of other parts.
template <class Gate>
__global__ void __launch_bounds__(WIDE) gated_squares(const __grid_constant__ GatedPartArguments a) {
    __shared__ float sums[WIDE];
    const size_t row = size_t(blockIdx.z) * a.T + blockIdx.y;
    float4 own[WIDE_PARTS];
    launch_next_kernel();
    wait_for_previous_kernel();
    load_gated<Gate>(a.value + row * a.O, a.gate, row * a.V + a.first, a.O, own);
    const float total = sum_of_squares(own, sums);
    if (threadIdx.x < a.S) a.squares[row * a.S + threadIdx.x] = int(threadIdx.x) == a.place ? total : 0.f;
}

// Grid: 1, tokens, sequences. A rank's columns are normed by the squares of all.
template <class Gate, class Compute>
__global__ void __launch_bounds__(WIDE) gated_part_norm(const __grid_constant__ GatedPartArguments a) {
    const size_t row = size_t(blockIdx.z) * a.T + blockIdx.y;
    float4 own[WIDE_PARTS];
    launch_next_kernel();
    wait_for_previous_kernel();
    load_gated<Gate>(a.value + row * a.O, a.gate, row * a.V + a.first, a.O, own);
    const float mean = __fdiv_rn(__ldcg(a.squares + row * a.S + a.place), float(a.norm.whole));
    const Compute* weights = reinterpret_cast<const Compute*>(a.norm.weight);
    Compute* output = reinterpret_cast<Compute*>(a.output) + row * a.O;
    store_normed(own, reciprocal_root(mean + float(a.norm.epsilon)), weights, a.O, output);
}

// Grid: blocks of columns, tokens, sequences.
template <class Value>
__global__ void __launch_bounds__(THREADS) separate_gates(const __grid_constant__ SeparateGatesArguments a) {
    const unsigned column = blockIdx.x * THREADS + threadIdx.x, size = a.heads.size, queries = a.heads.heads * size;
    const size_t row = size_t(blockIdx.z) * a.T + blockIdx.y;
    launch_next_kernel();
    wait_for_previous_kernel();
    if (column >= a.Q) return;
    const unsigned source = column < queries ? column / size * 2 * size + column % size : column + queries;
    const Value* values = reinterpret_cast<const Value*>(a.value) + row * a.V;
    reinterpret_cast<Value*>(a.qkv)[row * a.Q + column] = __ldcg(values + source);
}

// Grid: blocks of columns, tokens, sequences.
template <class Value, class Compute>
__global__ void __launch_bounds__(THREADS) sigmoid_gate(const __grid_constant__ SigmoidGateArguments a) {
    const unsigned column = blockIdx.x * THREADS + threadIdx.x, size = a.heads.size;
    const size_t row = size_t(blockIdx.z) * a.T + blockIdx.y;
    launch_next_kernel();
    wait_for_previous_kernel();
    if (column >= a.O) return;
    const float gate = loaded<Value>(a.value, row * a.V + column / size * 2 * size + size + column % size);
    Compute* context = reinterpret_cast<Compute*>(a.context) + row * a.O + column;
    *context = rounded<Compute>(to_float(__ldcg(context)) * portable_sigmoid(gate));
}

}  // namespace recurrent
