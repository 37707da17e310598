// The sums of a tile of tiled_linear.cu that a thread has: where they stand, and what LoRA adapters have to do with
// them.
#pragma once
#include "shared/clusters.cuh"
#include "decode/adapters.cuh"
#include "decode/tiled_ring.cuh"

namespace decode {
namespace tiled {

constexpr int GROUPS = SLICES / SLICES_OF_A_GROUP;

template <typename G> using Sums = float[G::ROW_TILES][G::COLUMN_TILES][4];

template <typename G, typename Action> __device__ __forceinline__ void for_each_sum(const Action& action) {
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) action(r, c, i);
}

// Adds to a sum what another one holds, which then begins anew.
template <typename G> __device__ __forceinline__ void add_to(Sums<G>& sum, Sums<G>& other) {
    for_each_sum<G>([&](int r, int c, int i) { sum[r][c][i] += other[r][c][i], other[r][c][i] = 0.f; });
}

// Where a thread's sums stand in the tile.
template <typename G> struct Lane {
    int row, column_warp;

    __device__ Lane()
        : row(threadIdx.x / 32 % G::ROW_WARPS * G::ROW_TILES * 16), column_warp(threadIdx.x / 32 / G::ROW_WARPS) {}
    // The first weight row of the warp's tile `c`.
    __device__ int tile_row(int c) const {
        const int tile = column_warp * G::COLUMN_TILES + c;
        return G::PAIRED ? tile % 2 * G::UNIT + tile / 2 * 8 : tile * 8;
    }
    __device__ int row_of(int r, int i) const { return row + r * 16 + i / 2 * 8 + row_of_eight(threadIdx.x % 32 / 4); }
    __device__ int weight_row_of(int c, int i) const { return tile_row(c) + row_of_eight(threadIdx.x % 4 * 2 + i % 2); }
};

template <typename T, bool ADAPTED> struct RowsOf { using type = AdaptedRows<T>; };
template <typename T> struct RowsOf<T, false> { using type = NoAdapters; };

// Leaves the products of a tile of A. Eight rows of it are of one place.
template <typename T, typename G>
__device__ __forceinline__ void leave_products(
    const AdaptedRows<T>& adapters, const Sums<G>& total, const Lane<G>& lane, int first) {
    unsigned scales[G::ROW_TILES][G::COLUMN_TILES][2];
    int place[G::COLUMN_TILES], begin[G::COLUMN_TILES];
#pragma unroll
    for (int c = 0; c < G::COLUMN_TILES; ++c) {
        const int row = first + lane.tile_row(c);
        place[c] = row / adapters.low_rows(), begin[c] = row - place[c] * adapters.low_rows();
    }
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int b = min(lane.row_of(r, 2 * half), adapters.batch - 1);
#pragma unroll
            for (int c = 0; c < G::COLUMN_TILES; ++c)
                scales[r][c][half] = place[c] < adapters.given.places ? adapters.scale(b, place[c]) : 0;
        }
    for_each_sum<G>([&](int r, int c, int i) {
        const float next = __shfl_down_sync(FULL_WARP, total[r][c][i], 1);
        const int p = begin[c] + lane.weight_row_of(c, i) - lane.tile_row(c);
        if (p % 2 == 0) adapters.leave(place[c], lane.row_of(r, i), p, scales[r][c][i / 2], total[r][c][i], next);
    });
}

// What adapters add to a tile's sums, from zero.
template <typename T, typename G>
__device__ __forceinline__ void add_adapters(
    const AdaptedRows<T>& adapters, Sums<G>& added, const Lane<G>& lane, int first, int rows) {
    const int own = row_of_eight(threadIdx.x % 32 / 4), modules = adapters.given.modules, rank = adapters.given.rank;
    const auto column_of = [&](int c) {
        const int row = lane.tile_row(c);
        return first + row + (G::PAIRED && row >= G::UNIT ? rows - G::UNIT : 0);
    };
#pragma unroll 1
    for (unsigned left = adapters.used; left != 0; left &= left - 1) {
        const int place = __ffs(left) - 1;
        bool taken_by[2 * G::ROW_TILES];
#pragma unroll
        for (int i = 0; i < 2 * G::ROW_TILES; ++i) {
            const int b = lane.row_of(0, 0) + 8 * i;
            taken_by[i] = adapters.takes(b, place) && b < adapters.batch;
        }
        Sums<G> sum = {};
#pragma unroll 1
        for (int module = adapters.module_of(column_of(0)); module < modules; module += G::SUMS) {  // of pairs: both
            if (module > adapters.module_of(column_of(G::COLUMN_TILES - G::SUMS))) break;
#pragma unroll 1
            for (int k = 0; k < rank; k += 16) {
                unsigned b[G::COLUMN_TILES][2][2], a[G::SUMS][2 * G::ROW_TILES][2];
#pragma unroll
                for (int c = 0; c < G::COLUMN_TILES; ++c)
                    adapters.read_b(b[c], place, module + c % G::SUMS, column_of(c) + own, k);
#pragma unroll
                for (int s = 0; s < G::SUMS; ++s)
                    adapters.template wait_for_low<2 * G::ROW_TILES>(
                        a[s], taken_by, place, module + s, lane.row_of(0, 0), k);
#pragma unroll
                for (int c = 0; c < G::COLUMN_TILES; ++c) {
                    if (adapters.module_of(column_of(c)) != module + c % G::SUMS) continue;
#pragma unroll
                    for (int r = 0; r < G::ROW_TILES; ++r) {
                        const auto& low = a[c % G::SUMS];
                        const unsigned rows_of[2][2] = {
                            {low[2 * r][0], low[2 * r][1]}, {low[2 * r + 1][0], low[2 * r + 1][1]}};
                        const unsigned first = b[c][0][0] | b[c][0][1] << 16, second = b[c][1][0] | b[c][1][1] << 16;
                        adapters.template multiply<2>(sum[r][c], rows_of, first, second);
                    }
                }
            }
        }
        add_to<G>(added, sum);
    }
}

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
        if (place >= adapters.given.places) continue;
        float sum[2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
                sum[i] += read_cluster(areas[g] + (b * G::AREA_STRIDE + row - first + i) * 4);
        adapters.leave(place, b, row % adapters.low_rows(), adapters.scale(b, place), sum[0], sum[1]);
    }
}

}  // namespace tiled
}  // namespace decode
