// What the kernels of linear.cu take, which chain.cu takes several of.
#pragma once
#include "decode/activations.cuh"

namespace decode {

constexpr int TILE_ROWS = 8;  // weight rows of one tensor-core instruction

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

}  // namespace decode
