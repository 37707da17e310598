// What the kernels of few rows take: those of linear.cu, and of packed_rows.cu.
#pragma once
#include "decode/activations.cuh"
#include "decode/outputs.cuh"

namespace decode {

// What the kernels that norm take. inputs: one, or two side by side. next_early: whether the next kernel may start at once,
// or only when the previous one has finished. output: float, or T of gates and ups.
struct NormLinear {
    NormedInput inputs[2];
    Linear linear;
    Kept kept;
    void* output;
    int next_early, activation;
};

// What linear_residual takes. input: of T; selected: see SelectedRows; stage: activations are staged, not streamed.
struct LinearResidual {
    Linear linear;
    Kept kept;
    const void *input, *residual;
    float* output;
    const int* selected;
    int residual_float, tokens, stage;
};
static_assert(sizeof(NormLinear) == HOST_NORM_LINEAR_BYTES && sizeof(LinearResidual) == HOST_LINEAR_RESIDUAL_BYTES,
              "as the host's structures");

template <typename T> __device__ __forceinline__ NormInputs<T, 1> one_input(const NormLinear& arguments) {
    const NormedInput& input = arguments.inputs[0];
    const Kept& kept = arguments.kept;
    return {{input.values}, {input.is_float != 0}, {static_cast<const T*>(input.weight)}, {input.stride}, input.epsilon,
            input.offset, arguments.linear.columns, static_cast<T*>(kept.target), kept.stride, kept.raw != 0};
}

template <typename T> __device__ __forceinline__ ResidualOutput<T> residual_output(const LinearResidual& arguments) {
    return {arguments.output, arguments.linear.scale, arguments.linear.width, arguments.residual, arguments.residual_float != 0,
            {arguments.selected, arguments.tokens}, static_cast<T*>(arguments.kept.target), arguments.kept.stride};
}

}  // namespace decode
