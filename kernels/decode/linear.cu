// The kernels of linear layers of a few rows of activations, by linear.cuh.
#include "decode/linear.cuh"

namespace decode {

// By what becomes of sums: scale (sums + bias), activation(gate) up, or activation(sums + bias) times other rows; of norm(input)
// or, not NORMED, of the rounded input, which the kernels called added_ first add to a residual.
#define KERNEL_OF_INPUT(NAME, ARGUMENTS, OUTPUT, IS_NORMED)                                                        \
    template <typename T, typename G, bool ADAPTED = false, bool NORMED = IS_NORMED>                               \
    __global__ void __launch_bounds__(THREADS, G::BLOCKS) NAME(const __grid_constant__ ARGUMENTS arguments) {      \
        const auto inputs = one_input<T>(arguments, G::PARTIAL);                                                   \
        multiply_normalized<T, 1, G::HELD, G, ADAPTED, NORMED>(inputs, arguments, OUTPUT<T>(arguments));           \
    }
KERNEL_OF_INPUT(norm_linear, NormLinear, float_output, true)
KERNEL_OF_INPUT(added_norm_linear, AddedNormLinear, float_output, true)
KERNEL_OF_INPUT(norm_gate_up, NormLinear, gated_output, true)
KERNEL_OF_INPUT(added_norm_gate_up, AddedNormLinear, gated_output, true)
KERNEL_OF_INPUT(token_gate, NormLinear, through_output, false)
KERNEL_OF_INPUT(added_token_gate, AddedNormLinear, through_output, false)
#undef KERNEL_OF_INPUT

// The same as norm_linear of two inputs as wide as each other, the first of T, the second of SECOND, side by side.
template <typename T, typename SECOND>
__global__ void __launch_bounds__(THREADS, 1) norms_linear(const __grid_constant__ NormLinear arguments) {
    constexpr bool IS_FLOAT = sizeof(SECOND) == sizeof(float);
    const NormedInput &first = arguments.inputs[0], &second = arguments.inputs[1];
    const NormInputs<T, 2> inputs{
        {first.values, second.values}, {false, IS_FLOAT},
        {static_cast<const T*>(first.weight), static_cast<const T*>(second.weight)}, {first.stride, second.stride},
        first.epsilon, first.offset, arguments.linear.columns / 2, static_cast<T*>(arguments.kept.target),
        arguments.kept.stride, arguments.kept.raw != 0};
    const FloatOutput output = float_output(arguments.output, arguments.linear);
    multiply_normalized<T, 2, IS_FLOAT ? Wide::HELD : 0, Wide, false>(inputs, arguments, output);
}

// output = residual + scale (input weight^T + bias)
template <typename T, typename G, bool ADAPTED = false>
__global__ void __launch_bounds__(THREADS, G::BLOCKS) linear_residual(const __grid_constant__ LinearResidual arguments) {
    extern __shared__ __align__(16) char shared[];
    const Linear& linear = arguments.linear;
    const int batch = linear.batch, columns = linear.columns, steps = linear.steps;
    const T *input = static_cast<const T*>(arguments.input), *bias = static_cast<const T*>(linear.bias);
    const ResidualOutput<T> output = residual_output<T>(arguments);
    float* partial = reinterpret_cast<float*>(shared + G::PARTIAL);
    char* staged = shared + G::SUMS_BEGIN;

    launch_next_kernel();
    Weights<T, G, ADAPTED> weights(linear, shared);
    weights.begin(shared + (arguments.stage ? G::staged_bytes(batch, steps) : G::streamed_bytes(batch)));
    wait_for_previous_kernel();
    weights.adapters.clear_next();
    if (arguments.stage) {
        stage_as_is(input, output.source, staged, batch, columns, steps);
        multiply_units(weights, staged_for_lane(staged, batch, steps), bias, output, partial, batch);
        return;
    }
    Streamed<T, G::HALVES> activations;
    activations.address =
        shared_address(staged + (threadIdx.x / 32 * batch + own_row()) * 64 + own_quad() * 16);
    activations.stage_bytes = WARPS * batch * 64, activations.columns = columns, activations.column = weights.column;
#pragma unroll
    for (int half = 0; half < G::HALVES; ++half) {
        const int row = own_row() + 8 * half;
        activations.exists[half] = row < batch;
        activations.row[half] = input + weights.column;
        if (row < batch) activations.row[half] += static_cast<size_t>(output.source(row)) * columns;
    }
#pragma unroll
    for (int stage = 0; stage < G::STAGES; ++stage) activations.copy(stage, stage % steps);
    commit_copies();
    wait_for_copies<0>();
    multiply_units(weights, activations, bias, output, partial, batch);
}

}  // namespace decode
