// Packed weights as a matrix of the compute dtype: the values that packed_linear.cu multiplies, bit for bit.
#include "decode/packed_copies.cuh"

namespace decode {
namespace packed {

// weight: [row blocks, blocks] of them, as device_layout.py says; values [rows, columns] of T. Columns come in eights.
struct Dequantize {
    const char* weight;
    void* values;
    int rows, columns;
};
static_assert(sizeof(Dequantize) == HOST_DEQUANTIZE_BYTES, "as the host's structure");

constexpr int WARPS = HOST_WARPS, BLOCKS = HOST_BLOCKS;  // of a block of threads; of weights, of a warp, read at once

// A lane's scales in a block of weights, as Group takes them.
template <int BYTES> __device__ __forceinline__ void read_scales(const char* place, unsigned (&scales)[(BYTES + 3) / 4]) {
    if constexpr (BYTES == 2) {
        scales[0] = __ldg(reinterpret_cast<const unsigned short*>(place));
    } else if constexpr (BYTES == 4) {
        scales[0] = __ldg(reinterpret_cast<const unsigned*>(place));
    } else if constexpr (BYTES == 8) {
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(place));
        scales[0] = two.x, scales[1] = two.y;
    } else {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(place));
        scales[0] = four.x, scales[1] = four.y, scales[2] = four.z, scales[3] = four.w;
    }
}

// A lane has of a row 8 columns in each step of 32, four lanes have the step: 64 bytes side by side. Matrices that are made
// one behind the other overlap; only what comes behind them all reads them.
template <typename T, int SCALES, int MODE>
__global__ void __launch_bounds__(32 * WARPS) dequantize(const Dequantize arguments) {
    launch_next_kernel();
    constexpr int SCALE_BYTES = 2 * SCALES * (MODE == ZEROS ? 2 : 1), BLOCK_BYTES = CODE_BYTES + 8 * SCALE_BYTES;
    const int along = (arguments.columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS, lane = threadIdx.x % 32;
    const int first = (blockIdx.x * WARPS + threadIdx.x / 32) * BLOCKS, all = (arguments.rows + 7) / 8 * along;
    uint4 codes[BLOCKS];
    unsigned scales[BLOCKS][(SCALE_BYTES + 3) / 4];
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        const char* block = arguments.weight + static_cast<size_t>(min(first + i, all - 1)) * BLOCK_BYTES;
        codes[i] = __ldcs(reinterpret_cast<const uint4*>(block) + lane);
        read_scales<SCALE_BYTES>(block + CODE_BYTES + own_row() * SCALE_BYTES, scales[i]);
    }
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        const int row = (first + i) / along * 8 + own_row(), column = (first + i) % along * BLOCK_COLUMNS + own_quad() * 8;
        T* target = static_cast<T*>(arguments.values) + static_cast<size_t>(row) * arguments.columns + column;
        const unsigned words[BLOCK_STEPS] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
        Group<T, MODE> group;
#pragma unroll
        for (int step = 0; step < BLOCK_STEPS; ++step) {
            if (step % (BLOCK_STEPS / SCALES) == 0) group.set(scales[i], step * SCALES / BLOCK_STEPS);
            unsigned four[4];
            group.values(words[step], LOW, four);
            if (row < arguments.rows && column + step * 32 < arguments.columns)
                *reinterpret_cast<uint4*>(target + step * 32) = make_uint4(four[0], four[1], four[2], four[3]);
        }
    }
    wait_for_previous_kernel();
}

}  // namespace packed
}  // namespace decode
