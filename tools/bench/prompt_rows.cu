// Linear layers of any number of rows by mma.sync: what the decode kernels' order of sums costs at a prompt's size.
//
// output [M, N] = input [M, K] weight [N, K]^T. A step of 32 columns is multiplied as the decode kernels do: a lane has 8
// columns of a weight row as published, of which the first four make the first product of the step and the others the
// second. Rows of activations lie permuted in each 32 columns (`permuted` in prompt_rows.py), so that the four matrices
// that are loaded at once are the tensor cores' operand as it is: without it each operand is put together by moves,
// more of them than products.
#include "decode/outputs.cuh"
#include "decode/tiled_sums.cuh"

namespace prompt {
using namespace decode;
using tiled::for_each_sum;
using tiled::lane_offset;
using tiled::row_of_eight;
using tiled::TensorMap;

// Sums: ONE of all columns; RUNNING, slices added to one total in order; GROUPED, slices, four a group, groups in order.
enum Order { ONE, RUNNING, GROUPED };

// Tiles of a warp: ROW_TILES of 16 rows of activations, COLUMN_TILES of 8 weight rows; ROW_WARPS times COLUMN_WARPS warps
// a block. SHARED_TOTAL: totals of groups lie in shared memory. AHEAD: a step is read while the one before is multiplied.
// CLUSTER blocks below each other share their weight rows, of which each copies a part to all.
template <typename T_, int ROW_TILES_, int COLUMN_TILES_, int ROW_WARPS_, int COLUMN_WARPS_, int STAGES_, int ORDER_,
          bool SHARED_TOTAL_, bool AHEAD_, int CLUSTER_>
struct Geometry {
    using T = T_;
    static constexpr int ROW_TILES = ROW_TILES_, COLUMN_TILES = COLUMN_TILES_, ROW_WARPS = ROW_WARPS_;
    static constexpr int STAGES = STAGES_, ORDER = ORDER_, CLUSTER = CLUSTER_, WARPS = ROW_WARPS * COLUMN_WARPS_;
    static constexpr bool SHARED_TOTAL = SHARED_TOTAL_, AHEAD = AHEAD_;
    static constexpr int THREADS = 32 * WARPS, ROWS = 16 * ROW_TILES * ROW_WARPS;
    static constexpr int WEIGHT_ROWS = 8 * COLUMN_TILES * COLUMN_WARPS_, SHARE = WEIGHT_ROWS / CLUSTER;
    static constexpr int STAGE_BYTES = (ROWS + WEIGHT_ROWS) * 128, TOTAL = STAGES * STAGE_BYTES + 1024;
};

__device__ __forceinline__ void wait_for(unsigned barrier, int parity) {
    asm volatile(
        "{\n.reg .pred ready;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 ready, [%0], %1;\n@!ready bra again;\n}" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
}

// Copies a tile of 64 columns; `blocks` of the cluster get it where there are several.
__device__ __forceinline__ void copy(
    unsigned target, const TensorMap& map, int column, int row, unsigned barrier, int blocks) {
    if (blocks == 1)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3}], [%4];" ::"r"(target), "l"(&map), "r"(column), "r"(row), "r"(barrier)
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                     "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target), "l"(&map), "r"(column), "r"(row), "r"(barrier),
                     "h"(static_cast<unsigned short>((1 << blocks) - 1))
                     : "memory");
}

// As `multiply_add`, from zero.
#define MULTIPLY(T, NAME)                                                                                              \
    __device__ __forceinline__ void multiply(float(&sum)[4], const unsigned(&a)[4], unsigned b0, unsigned b1, T) {     \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 "                                    \
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"                                       \
                     : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));                        \
    }
MULTIPLY(__half, "f16")
MULTIPLY(__nv_bfloat16, "bf16")
#undef MULTIPLY

// What a warp multiplies in a step.
template <typename G> struct Fragments {
    unsigned rows[G::ROW_TILES][2][4];
    uint4 weights[G::COLUMN_TILES];

    __device__ void read(unsigned stage, int row, int column, int step) {
        const int lane = threadIdx.x % 32, own = lane % 16, piece = step * 4 + lane / 16;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int r = 0; r < G::ROW_TILES; ++r)
                load_matrices(rows[r][half], stage + (row + r * 16 + own) * 128 + ((piece + half * 2) ^ own % 8) * 16);
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; ++c)
            weights[c] = read_shared_16(stage + lane_offset(step) + (G::ROWS + column + c * 8) * 128);
    }
    // BEGINS: the sums are zero, whatever they hold.
    template <bool BEGINS> __device__ void multiply_by(float (&sum)[G::ROW_TILES][G::COLUMN_TILES][4]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
                for (int c = 0; c < G::COLUMN_TILES; ++c) {
                    const unsigned(&a)[4] = rows[r][half];
                    const unsigned lower[2] = {a[0], a[1]}, upper[2] = {a[2], a[3]};
                    const unsigned b0 = half == 0 ? weights[c].x : weights[c].z;
                    const unsigned b1 = half == 0 ? weights[c].y : weights[c].w;
                    if (BEGINS && half == 0) multiply(sum[r][c], a, b0, b1, typename G::T());
                    else multiply_add(sum[r][c], lower, upper, b0, b1, typename G::T());
                }
    }
};

// Grid: as many blocks as run at once, which walk over the tiles in bands of `band` rows of tiles. steps: of a slice.
template <typename T, int... SIZES>
__global__ void __launch_bounds__(Geometry<T, SIZES...>::THREADS, 1) multiply_rows(
    const __grid_constant__ TensorMap input_map, const __grid_constant__ TensorMap weight_map, T* output, int rows,
    int weight_rows, int columns, int steps, int band) {
    using G = Geometry<T, SIZES...>;
    extern __shared__ __align__(1024) char shared[];
    const unsigned memory = shared_address(shared), barriers = memory + G::STAGES * G::STAGE_BYTES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp % G::ROW_WARPS * G::ROW_TILES * 16, column = warp / G::ROW_WARPS * G::COLUMN_TILES * 8;
    const int high = ((rows + G::ROWS - 1) / G::ROWS + G::CLUSTER - 1) / G::CLUSTER;
    const int wide = (weight_rows + G::WEIGHT_ROWS - 1) / G::WEIGHT_ROWS, tiles = high * wide;
    const int chunks = (columns + 63) / 64, rank = blockIdx.x % G::CLUSTER, stride = gridDim.x / G::CLUSTER;
    if (threadIdx.x == 0) {
        for (int i = 0; i < G::STAGES; ++i) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + i * 16) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barriers + i * 16 + 8), "n"(G::WARPS * G::CLUSTER)
                         : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (G::CLUSTER > 1) cluster_barrier();
    const auto place_of = [&](int tile, int& first_row, int& first_column) {
        const int begin = tile / (band * wide) * band, within = tile - begin * wide, height = min(band, high - begin);
        first_row = ((begin + within % height) * G::CLUSTER + rank) * G::ROWS;
        first_column = within / height * G::WEIGHT_ROWS;
    };
    int next_tile = blockIdx.x / G::CLUSTER, next_chunk = 0, next_stage = 0, next_parity = 1, asks = 0;
    const auto copy_next = [&](bool asked) {  // what is copied next; of each chunk another warp asks
        if (asked && next_tile < tiles) {
            int first_row, first_column;
            place_of(next_tile, first_row, first_column);
            const unsigned full = barriers + next_stage * 16, stage = memory + next_stage * G::STAGE_BYTES;
            wait_for(full + 8, next_parity);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "n"(G::STAGE_BYTES)
                         : "memory");
            copy(stage, input_map, next_chunk * 64, first_row, full, 1);
            copy(stage + (G::ROWS + rank * G::SHARE) * 128, weight_map, next_chunk * 64, first_column + rank * G::SHARE,
                 full, G::CLUSTER);
        }
        if (++next_chunk == chunks) next_chunk = 0, next_tile += stride;
        if (++next_stage == G::STAGES) next_stage = 0, next_parity ^= 1;
    };
    for (int i = 0; i < G::STAGES - 1; ++i) copy_next(threadIdx.x == 0);

    int stage = 0, parity = 0;
    float4* own_total = reinterpret_cast<float4*>(shared + G::TOTAL) + threadIdx.x;
    for (int tile = blockIdx.x / G::CLUSTER; tile < tiles; tile += stride) {
        using Sums = float[G::ROW_TILES][G::COLUMN_TILES][4];
        Sums sum = {}, group = {}, total = {};
        int steps_left = steps, slices_left = 4;
        bool begins = true, has_total = false;
        const auto end_group = [&] {
            if constexpr (G::SHARED_TOTAL) {
#pragma unroll
                for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
                    for (int c = 0; c < G::COLUMN_TILES; ++c) {
                        float4& place = own_total[(r * G::COLUMN_TILES + c) * G::THREADS];
                        float4 before = has_total ? place : make_float4(0.f, 0.f, 0.f, 0.f);
                        float(&own)[4] = group[r][c];
                        place = make_float4(before.x + own[0], before.y + own[1], before.z + own[2], before.w + own[3]);
                        own[0] = own[1] = own[2] = own[3] = 0.f;
                    }
            } else {
                for_each_sum<G>([&](int r, int c, int i) { total[r][c][i] += group[r][c][i], group[r][c][i] = 0.f; });
            }
            has_total = true;
        };
        const auto multiply_step = [&](const Fragments<G>& fragments) {
            if (G::ORDER == ONE) return fragments.template multiply_by<false>(sum);
            if (begins) fragments.template multiply_by<true>(sum);
            else fragments.template multiply_by<false>(sum);
            begins = --steps_left == 0;
            if (!begins) return;
            steps_left = steps;
            for_each_sum<G>([&](int r, int c, int i) { group[r][c][i] += sum[r][c][i]; });
            if (G::ORDER == GROUPED && --slices_left == 0) slices_left = 4, end_group();
        };
        const auto place = [&] { return memory + stage * G::STAGE_BYTES; };
        const auto release = [&] {
            __syncwarp();
            for (int b = 0; lane == 0 && b < G::CLUSTER; ++b) {
                unsigned empty = barriers + stage * 16 + 8;
                if (G::CLUSTER > 1) asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(empty) : "r"(b));
                asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(empty) : "memory");
            }
            if (++stage == G::STAGES) stage = 0, parity ^= 1;
            copy_next(threadIdx.x == 32 * asks);
            asks = (asks + 1) % G::WARPS;
        };
        if constexpr (G::AHEAD) {
            Fragments<G> first, second;
            wait_for(barriers + stage * 16, parity);
            first.read(place(), row, column, 0);
            for (int chunk = 1; chunk <= chunks; ++chunk) {
                second.read(place(), row, column, 1);
                multiply_step(first);
                release();
                if (chunk < chunks) {
                    wait_for(barriers + stage * 16, parity);
                    first.read(place(), row, column, 0);
                }
                multiply_step(second);
            }
        } else {
            for (int chunk = 0; chunk < chunks; ++chunk) {
                wait_for(barriers + stage * 16, parity);
                Fragments<G> fragments;
                fragments.read(place(), row, column, 0);
                multiply_step(fragments);
                fragments.read(place(), row, column, 1);
                release();
                multiply_step(fragments);
            }
        }
        if (G::ORDER != ONE && !begins) for_each_sum<G>([&](int r, int c, int i) { group[r][c][i] += sum[r][c][i]; });
        if (G::ORDER == GROUPED) end_group();
        int first_row, first_column;
        place_of(tile, first_row, first_column);
        for_each_sum<G>([&](int r, int c, int i) {
            const int m = first_row + row + r * 16 + i / 2 * 8 + lane / 4;
            const int n = first_column + column + c * 8 + row_of_eight(lane % 4 * 2 + i % 2);
            if (m >= rows || n >= weight_rows) return;
            const float* shared_total = reinterpret_cast<const float*>(&own_total[(r * G::COLUMN_TILES + c) * G::THREADS]);
            const float value = G::ORDER == ONE ? sum[r][c][i] : G::ORDER == RUNNING ? group[r][c][i]
                                : G::SHARED_TOTAL ? shared_total[i] : total[r][c][i];
            output[static_cast<size_t>(m) * weight_rows + n] = from_float<T>(value);
        });
    }
    if (G::CLUSTER > 1) cluster_barrier();
}

}  // namespace prompt
