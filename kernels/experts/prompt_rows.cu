// Products of many rows with the experts that each of them chose: those that chose the same one are multiplied together, as
// prompts are (prefill/linear.cu), in tiles of sorted.cu. So a pair of a row and an expert has the bits of few_rows.cuh.
#include "decode/many_rows.cuh"
#include "experts/outputs.cuh"
#include "prefill/linear_blocks.cuh"

namespace experts {

// `tiled.linear` is the first expert's; rows of input and output are those that `sorted` names. `limit`: of `clamped`.
struct SortedProduct {
    decode::TiledLinear tiled;
    prefill::SortedRows sorted;
    float limit;
};
static_assert(sizeof(SortedProduct) == HOST_SORTED_PRODUCT_BYTES, "as the host's structure");

// `clamped` of columns n, which is even, and n + 1. A thread that writes them one by one writes both, one behind the other.
template <typename T> struct ClampedOutput {
    T* output;
    float limit;
    mutable float gate;
    __device__ void write(int b, int n, int rows, float own, float up) const {
        output[static_cast<size_t>(b) * (rows / 2) + n / 2] = decode::from_float<T>(clamped(own, up, limit));
    }
    __device__ float before(int, int, int) const { return 0.f; }
    __device__ void operator()(int b, int n, int rows, const float (&sum)[1], float) const {
        if (n % 2 == 0) gate = sum[0];
        else write(b, n, rows, gate, sum[0]);
    }
    __device__ float2 before_two(int, int, int) const { return make_float2(0.f, 0.f); }
    __device__ void two(int b, int n, int rows, const float2 (&sum)[1], float2) const {
        write(b, n, rows, sum[0].x, sum[0].y);
    }
};

template <typename T, int KIND> __device__ __forceinline__ auto output_of(const SortedProduct& given) {
    void* output = given.tiled.output;
    if constexpr (KIND == GATED) return decode::GatedOutput<T>{static_cast<T*>(output), HOST_GATE};
    else if constexpr (KIND == ALTERNATING) return ClampedOutput<T>{static_cast<T*>(output), given.limit, 0.f};
    else if constexpr (KIND == SQUARED) return SquaredOutput<T>{static_cast<T*>(output), given.tiled.linear.rows};
    else return decode::float_output(output, given.tiled.linear);
}

// KIND: what it gives. Grid: as many blocks as run at once, or as there can be tiles.
template <typename T, int KIND, int ROW_TILES, int COLUMN_TILES, int ROW_WARPS, int COLUMN_WARPS, int BLOCKS, int TOTALS,
          int SCALES = 0, int MODE = 0>
__global__ void __launch_bounds__(32 * ROW_WARPS * COLUMN_WARPS, BLOCKS)
    prompt_rows(const __grid_constant__ SortedProduct given) {
    using G = prefill::Geometry<ROW_TILES, COLUMN_TILES, ROW_WARPS, COLUMN_WARPS, TOTALS, KIND == GATED, false, SCALES,
                                MODE, true>;
    static_assert(TOTALS != prefill::JOINED, "there are tiles enough for all multiprocessors");
    const decode::Linear& linear = given.tiled.linear;
    const T *weight = static_cast<const T*>(linear.weight), *bias = static_cast<const T*>(linear.bias);
    prefill::multiply<T, G>(given.tiled, weight, linear.rows, bias, output_of<T, KIND>(given), given.sorted);
}

}  // namespace experts
