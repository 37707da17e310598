// What stands around recurrent layers and gated attention: norms of heads with a gate, heads without their gates, and gates.
#include "recurrent/values.cuh"

namespace recurrent {

constexpr int THREADS = 128, GROUPS = THREADS / LANES, PARTS = HOST_MOST_SIZE / WIDTH;
static_assert(THREADS == HOST_GATES_THREADS, "the host makes the grids");

// Grid: blocks of heads, tokens, sequences. A group of lanes a head.
template <class Gate, class Compute>
__global__ void __launch_bounds__(THREADS) gated_norm(const __grid_constant__ GatedNormArguments a) {
    const unsigned head = blockIdx.x * GROUPS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const size_t row = size_t(blockIdx.z) * a.T + blockIdx.y;
    const bool exists = (head + 1) * a.E <= a.O;
    float4 values[PARTS];
    launch_next_kernel();
    wait_for_previous_kernel();
    load_vector(a.value + row * a.O + (exists ? head * a.E : 0), lane, a.E, values);
    const float mean = __fdiv_rn(sum_of_lanes(share(values, values)), float(a.E));
    scale(values, reciprocal_root(mean + float(a.norm.epsilon)));
    if (!exists) return;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const float four[4] = {values[part].x, values[part].y, values[part].z, values[part].w};
        const unsigned first = part * WIDTH + 4 * lane;
        if (first >= a.E) break;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned column = head * a.E + first + i;
            const float gate = loaded<Gate>(a.gate, row * a.V + a.norm.first + column);
            const float normed = four[i] * to_float(__ldg(reinterpret_cast<const Compute*>(a.norm.weight) + first + i));
            reinterpret_cast<Compute*>(a.output)[row * a.O + column] = rounded<Compute>(normed * portable_silu(gate));
        }
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
