// Packed weights as a matrix of the compute dtype: the values that packed_linear.cu multiplies, bit for bit.
#include "decode/packed_blocks.cuh"

namespace decode {
namespace packed {

// weight: [row blocks, blocks] of them, as device_layout.py says; values [rows, columns] of T. Columns come in eights. order,
// scales [columns] (null: none): where a column of the codes belongs, and what it is multiplied by.
struct Dequantize {
    const char* weight;
    void* values;
    const int* order;
    const float* scales;
    int rows, columns;
};
static_assert(sizeof(Dequantize) == HOST_DEQUANTIZE_BYTES, "as the host's structure");

constexpr int WARPS = HOST_WARPS;  // of a block of threads, each with a block of weights

// Eight columns of a row from `column` on, each where it belongs, times its scale, rounded once more.
template <typename T>
__device__ __forceinline__ void write_arranged(const Dequantize& arguments, T* row, int column, const unsigned (&four)[4]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float2 two = unpack<T>(four[j / 2]);
        const float scale = arguments.scales == nullptr ? 1.f : __ldg(arguments.scales + column + j);
        const int place = arguments.order == nullptr ? column + j : __ldg(arguments.order + column + j);
        row[place] = from_float<T>((j % 2 == 0 ? two.x : two.y) * scale);
    }
}

// A lane has of a row 8 columns in each step of 32, four lanes have the step: 64 bytes side by side. Matrices that are made
// one behind the other overlap; only what comes behind them all reads them.
template <typename T, int SCALES, int MODE, bool ARRANGED>
__global__ void __launch_bounds__(32 * WARPS) dequantize(const Dequantize arguments) {
    launch_next_kernel();
    const int along = (arguments.columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
    const int block = blockIdx.x * WARPS + threadIdx.x / 32;
    const int row = block / along * 8 + own_row(), column = block % along * BLOCK_COLUMNS + own_quad() * 8;
    if (row < arguments.rows) {
        T* target = static_cast<T*>(arguments.values) + static_cast<size_t>(row) * arguments.columns;
        Lane<SCALES, MODE> lane;
        Group<T, MODE> group;
        lane.read(GlobalBlock{arguments.weight + static_cast<size_t>(block) * Format<SCALES, MODE>::BLOCK_BYTES});
#pragma unroll
        for (int step = 0; step < BLOCK_STEPS; ++step) {
            unsigned four[4];
            lane.begin(group, step, LOW);
            lane.values(group, step, LOW, four);
            const int place = column + step * 32;
            if (place >= arguments.columns) continue;
            if constexpr (ARRANGED) write_arranged<T>(arguments, target, place, four);
            else *reinterpret_cast<uint4*>(target + place) = make_uint4(four[0], four[1], four[2], four[3]);
        }
    }
    wait_for_previous_kernel();
}

}  // namespace packed
}  // namespace decode
