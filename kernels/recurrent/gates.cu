// What stands around recurrent layers and gated attention: norms of heads with a gate, heads without their gates, and gates.
#include "recurrent/values.cuh"

namespace recurrent {

constexpr int THREADS = 128, GROUPS = THREADS / LANES, PARTS = HOST_MOST_SIZE / WIDTH;
static_assert(THREADS == HOST_GATES_THREADS, "the host makes the grids");

// The element of a vector that is a lane's i-th, as `load_vector` has them.
__device__ __forceinline__ unsigned element_of(int i, unsigned lane) { return i / 4 * WIDTH + 4 * lane + i % 4; }

// Grid: blocks of heads, tokens, sequences. A group of lanes a head.
template <class Gate, class Compute>
__global__ void __launch_bounds__(THREADS) gated_norm(const __grid_constant__ GatedNormArguments a) {
    const unsigned head = blockIdx.x * GROUPS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const size_t row = size_t(blockIdx.z) * a.T + blockIdx.y;
    const bool exists = (head + 1) * a.E <= a.O;
    const unsigned begin = exists ? head * a.E : 0;
    const Compute* weight = reinterpret_cast<const Compute*>(a.norm.weight);
    float4 values[PARTS];
    float weights[4 * PARTS], gates[4 * PARTS];
    launch_next_kernel();
#pragma unroll
    for (int i = 0; i < 4 * PARTS; ++i)
        if (element_of(i, lane) < a.E) weights[i] = to_float(__ldg(weight + element_of(i, lane)));
    wait_for_previous_kernel();
    load_vector(a.value + row * a.O + begin, lane, a.E, values);
#pragma unroll
    for (int i = 0; i < 4 * PARTS; ++i)  // under way beside the values: nothing below waits for memory again
        if (element_of(i, lane) < a.E)
            gates[i] = loaded<Gate>(a.gate, row * a.V + a.norm.first + begin + element_of(i, lane));
    const float mean = __fdiv_rn(sum_of_lanes(share(values, values)), float(a.E));
    scale(values, reciprocal_root(mean + float(a.norm.epsilon)));
    if (!exists) return;
    Compute* output = reinterpret_cast<Compute*>(a.output) + row * a.O + begin;
#pragma unroll
    for (int i = 0; i < 4 * PARTS; ++i) {
        const float four[4] = {values[i / 4].x, values[i / 4].y, values[i / 4].z, values[i / 4].w};
        if (element_of(i, lane) >= a.E) break;
        output[element_of(i, lane)] = rounded<Compute>(four[i % 4] * weights[i] * portable_silu(gates[i]));
    }
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
