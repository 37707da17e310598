// The sums of a tile of tiled_linear.cu that a thread has: where they stand, and what LoRA adapters have to do with
// them.
#pragma once
#include "shared/clusters.cuh"
#include "shared/tile_sums.cuh"
#include "decode/adapters.cuh"
#include "decode/tiled_ring.cuh"

namespace decode {
namespace tiled {

// Where a thread's sums stand in the tile.
template <typename G> struct Lane : WarpTiles<G> {
    __device__ Lane()
        : WarpTiles<G>{int(threadIdx.x / 32 % G::ROW_WARPS * G::ROW_TILES * 16), int(threadIdx.x / 32 / G::ROW_WARPS)} {}
    __device__ int row_of(int r, int i) const {
        return this->row + r * 16 + i / 2 * 8 + row_of_eight(threadIdx.x % 32 / 4);
    }
    __device__ int weight_row_of(int c, int i) const {
        return this->tile_row(c) + row_of_eight(threadIdx.x % 4 * 2 + i % 2);
    }
};

// Leaves the products of a tile of A. Eight rows of it are of one place.
template <typename T, typename G>
__device__ __forceinline__ void leave_products(
    const AdaptedRows<T>& adapters, const Sums<G>& total, const Lane<G>& lane, int first) {
    int place[G::COLUMN_TILES], begin[G::COLUMN_TILES];
#pragma unroll
    for (int c = 0; c < G::COLUMN_TILES; ++c) {
        const int row = first + lane.tile_row(c);
        place[c] = row / adapters.low_rows(), begin[c] = row - place[c] * adapters.low_rows();
    }
    unsigned scales[G::ROW_TILES][G::COLUMN_TILES][2];
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; ++c)
#pragma unroll
            for (int half = 0; half < 2; ++half) scales[r][c][half] = adapters.scale(lane.row_of(r, 2 * half), place[c]);
    for_each_sum<G>([&](int r, int c, int i) {
        const float next = __shfl_down_sync(FULL_WARP, total[r][c][i], 1);
        const int p = begin[c] + lane.weight_row_of(c, i) - lane.tile_row(c);
        adapters.leave(place[c], lane.row_of(r, i), p, scales[r][c][i / 2], total[r][c][i], next);
    });
}

// What adapters add to the tiles of a block. `rows`: the outputs of the whole layer, of which a tile has some from
// `linear.first` on.
template <typename T, typename G> struct TileAdapters : AdaptedRows<T> {
    const Lane<G> lane;
    const int rows;
    uint2* products;                        // of A, in shared memory: [SUMS, ROWS] times 16 ranks
    unsigned right[G::COLUMN_TILES][2][2];  // what is multiplied next of B
    bool is_read;

    __device__ TileAdapters(const Adapters& adapters, int batch, int all_rows, char* shared)
        : AdaptedRows<T>(adapters, batch, all_rows * G::SUMS), rows(all_rows), products(reinterpret_cast<uint2*>(shared)),
          is_read(false) {}
    // The first column of the warp's column tile c, in the whole weight, and its module.
    __device__ int column(int first, int c) const {
        const int row = lane.tile_row(c);
        return first + row + (G::PAIRED && row >= G::UNIT ? rows - G::UNIT : 0);
    }
    __device__ int module(int first, int c) const { return this->module_of(column(first, c)); }
    // Reads rows of B: 16 ranks of a place, of one module, or of gates' and ups'.
    __device__ void read(int first, int place, int module, int k) {
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; ++c) {
            const int n = column(first, c) + row_of_eight(threadIdx.x % 32 / 4);
            this->read_b(right[c], place, module + c % G::SUMS, n, k);
        }
    }
    // Has rows of B come while a tile is multiplied: those that are taken first, where registers have room for them, and
    // all into the second-level cache.
    __device__ void begin(int first) {
        const bool takes_more = (this->used & (this->used - 1)) != 0 || this->given.rank > 16;
        if (!G::EARLY_B || takes_more)
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s) this->fetch(first + s * rows, G::UNIT, TILED_THREADS);
        is_read = G::EARLY_B && this->used != 0;
        if (is_read) read(first, __ffs(this->used) - 1, module(first, 0), 0);
    }
    // What is added to a tile's sums, from zero. All threads of the block call it.
    __device__ void add(Sums<G>& added, int first) {
        const int last = G::PAIRED ? 0 : this->module_of(min(first + G::UNIT, rows) - 1);
#pragma unroll 1
        for (unsigned left = this->used; left != 0; left &= left - 1) {
            const int place = __ffs(left) - 1;
            Sums<G> sum = {};
#pragma unroll 1
            for (int m = this->module_of(first); m <= last; m += G::SUMS) {  // of pairs: both
                const bool is_own = G::PAIRED || (module(first, 0) <= m && m <= module(first, G::COLUMN_TILES - 1));
#pragma unroll 1
                for (int k = 0; k < this->given.rank; k += 16) {
                    bring_products(place, m, k);
                    if (!is_own) continue;
                    if (!is_read) read(first, place, m, k);
                    is_read = false;
                    multiply_ranks(sum, first, m);
                }
            }
            add_to<G>(added, sum);
        }
    }

  private:
    // Copies the products of 16 ranks, once for all warps: if each of a GPU's warps asked for them, those few lines of
    // the second-level cache would be what all wait for.
    __device__ void bring_products(int place, int m, int k) const {
        __syncthreads();  // those before have been read
#pragma unroll 1
        for (int i = threadIdx.x; i < G::PRODUCTS; i += TILED_THREADS) {
            const int row = i / 4 % G::ROWS;
            const bool taken_by[1] = {this->takes(row, place)};
            unsigned left[1][2];
            while (!__all_sync(FULL_WARP, this->read_low(left, taken_by, place, m + i / 4 / G::ROWS, row, k))) continue;
            products[i] = make_uint2(left[0][0], left[0][1]);
        }
        __syncthreads();
    }
    __device__ void multiply_ranks(Sums<G>& sum, int first, int m) const {
        uint2 left[G::SUMS][2 * G::ROW_TILES];
#pragma unroll
        for (int s = 0; s < G::SUMS; ++s)
#pragma unroll
            for (int i = 0; i < 2 * G::ROW_TILES; ++i)
                left[s][i] = products[(s * G::ROWS + lane.row_of(0, 0) + 8 * i) * 4 + threadIdx.x % 4];
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; ++c) {
            if (!G::PAIRED && module(first, c) != m) continue;
            const unsigned lower = right[c][0][0] | right[c][0][1] << 16, upper = right[c][1][0] | right[c][1][1] << 16;
#pragma unroll
            for (int r = 0; r < G::ROW_TILES; ++r) {
                const uint2 &one = left[c % G::SUMS][2 * r], &other = left[c % G::SUMS][2 * r + 1];
                const unsigned rows_of[2][2] = {{one.x, one.y}, {other.x, other.y}};
                this->template multiply<2>(sum[r][c], rows_of, lower, upper);
            }
        }
    }
};

template <typename T, typename G, bool ADAPTED> struct AdaptersOf { using type = TileAdapters<T, G>; };
template <typename T, typename G> struct AdaptersOf<T, G, false> { using type = NoAdapters; };

template <typename G> __device__ __forceinline__ void leave(float* area, const Sums<G>& sums, const Lane<G>& lane) {
    for_each_sum<G>([&](int r, int c, int i) {
        area[lane.row_of(r, i) * G::AREA_STRIDE + lane.weight_row_of(c, i)] = sums[r][c][i];
    });
}

// Leaves the products of a tile of A that the blocks of a cluster share.
template <typename T, typename G>
__device__ __forceinline__ void leave_joined(
    const AdaptedRows<T>& adapters, const unsigned (&areas)[GROUPS], int first, int own, int batch) {
    constexpr int PAIRS = G::WEIGHT_ROWS / 2;
    for (int at = own; at < batch * PAIRS; at += GROUPS * TILED_THREADS) {
        const int b = at / PAIRS, row = first + at % PAIRS * 2, place = row / adapters.low_rows();
        const unsigned scale = adapters.scale(b, place);
        float sum[2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
                sum[i] += read_cluster(areas[g] + (b * G::AREA_STRIDE + row - first + i) * 4);
        adapters.leave(place, b, row % adapters.low_rows(), scale, sum[0], sum[1]);
    }
}

}  // namespace tiled
}  // namespace decode
