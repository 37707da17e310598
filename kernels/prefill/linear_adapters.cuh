// What LoRA adapters add to the linear layers of linear.cu, as decode/adapters.cuh defines it. The products of A are
// there, made by a launch before; a row that does not take a place gets zeros from it.
#pragma once
#include "decode/adapters.cuh"
#include "prefill/linear_tiles.cuh"

namespace prefill {

// The adapters of any number of rows.
template <typename T> struct RowAdapters : AdaptedRows<T> {
    __device__ explicit RowAdapters(const Linear& linear, int outputs = 0)
        : AdaptedRows<T>(linear.adapters, linear.batch, outputs) {}
    __device__ bool takes_place(int row, int place) const {
        return row < this->batch && to_float(__ldg(this->scales_of(row) + place)) != 0.f;
    }
    // Leaves the products of a row and of rows n, even, and n + 1 of A, of all places'. Places begin at multiples of 8.
    __device__ void leave(int row, int n, float2 sums) const {
        const int place = n / this->low_rows();
        AdaptedRows<T>::leave(place, row, n - place * this->low_rows(), this->scale(row, place), sums.x, sums.y);
    }
};

// Adds to a tile's sums what adapters add. Each column tile is of one module.
template <typename T, typename G>
__device__ __forceinline__ void add_adapters(
    Sums<G>& total, const Lane<G>& lane, const Linear& linear, const Place& tile) {
    const RowAdapters<T> adapters(linear, linear.width * G::SUMS);
    Sums<G> added = {};
#pragma unroll 1
    for (int place = 0; place < adapters.given.places; ++place) {
        bool taken[G::ROW_TILES][2], any = false;
#pragma unroll
        for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                taken[r][half] = adapters.takes_place(tile.row + lane.row_of(r, half), place);
                any = any || taken[r][half];
            }
        if (!__any_sync(FULL_WARP, any)) continue;  // it would add zeros
        Sums<G> sum = {};
#pragma unroll 1
        for (int k = 0; k < adapters.given.rank; k += 16) {
            unsigned left[G::ROW_TILES][2][2];
            int module = -1;  // whose products `left` holds
#pragma unroll
            for (int c = 0; c < G::COLUMN_TILES; ++c) {
                // Of gates and ups, the ups' columns lie behind all gates'.
                const int row = lane.tile_row(c), own = threadIdx.x % 32 / 4;
                const int column = linear.first + tile.column + row + (G::PAIRED && row >= G::UNIT ? linear.rows - G::UNIT : 0);
                const int module_of = adapters.module_of(column);
                if (module_of != module) {
                    module = module_of;
#pragma unroll
                    for (int r = 0; r < G::ROW_TILES; ++r)
                        adapters.read_low(left[r], taken[r], place, module, tile.row + lane.row_of(r, 0), k);
                }
                unsigned right[2][2];
                adapters.read_b(right, place, module, column + own, k);
                const unsigned lower = right[0][0] | right[0][1] << 16, upper = right[1][0] | right[1][1] << 16;
#pragma unroll
                for (int r = 0; r < G::ROW_TILES; ++r) adapters.template multiply<2>(sum[r][c], left[r], lower, upper);
            }
        }
        for_each_sum<G>([&](int r, int c, int i) { added[r][c][i] += sum[r][c][i]; });
    }
    for_each_sum<G>([&](int r, int c, int i) { total[r][c][i] += added[r][c][i]; });
}

}  // namespace prefill
