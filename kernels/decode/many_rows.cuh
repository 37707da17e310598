// What the kernels of many rows take beside tensor maps: those of tiled_linear.cu and of direct_linear.cu.
#pragma once
#include "decode/outputs.cuh"

namespace decode {

// input: of T, rows `stride` elements apart; output: float, or T of gates and ups; stages: of the ring in shared memory;
// selected, tokens: see SelectedRows.
struct TiledLinear {
    Linear linear;
    Kept kept;
    const void *input, *residual;
    void* output;
    const int* selected;
    int stride, stages, residual_float, activation, tokens;
};
static_assert(sizeof(TiledLinear) == HOST_TILED_LINEAR_BYTES, "as the host's structure");

template <typename T> __device__ __forceinline__ ResidualOutput<T> residual_output(const TiledLinear& arguments) {
    return {static_cast<float*>(arguments.output), arguments.linear.scale, arguments.linear.width, arguments.residual,
            arguments.residual_float != 0, {arguments.selected, arguments.tokens},
            static_cast<T*>(arguments.kept.target), arguments.kept.stride};
}

}  // namespace decode
