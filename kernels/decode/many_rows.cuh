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
    return {static_cast<float*>(arguments.output), arguments.linear.scale, arguments.residual,
            arguments.residual_float != 0, {arguments.selected, arguments.tokens},
            static_cast<T*>(arguments.kept.target), arguments.kept.stride};
}

// Returns when all of the thread's groups of copies have come but as many of the youngest, which are 0 to 6.
__device__ __forceinline__ void wait_for_all_but(int groups) {
    switch (groups) {
        case 0: return wait_for_copies<0>();
        case 1: return wait_for_copies<1>();
        case 2: return wait_for_copies<2>();
        case 3: return wait_for_copies<3>();
        case 4: return wait_for_copies<4>();
        case 5: return wait_for_copies<5>();
        default: return wait_for_copies<HOST_MOST_STAGES - 2>();
    }
}
static_assert(HOST_MOST_STAGES == 8, "a case for each");

}  // namespace decode
