// Attention of all rows of a window to each other, with an online softmax (Dao et al. 2022; Dao 2023): tiles of keys pass by
// a block's queries, whose sums stay in registers. Tiles begin at multiples of KEYS rows of the window and are taken in
// order; those without a visible key are passed over. So a query's bits depend on the visible rows of its window alone.
#include "decode/common.cuh"
#include "encoder/arguments.cuh"

namespace encoder {

using decode::load_matrices;
using decode::load_transposed_matrices;
using decode::multiply;
using decode::pack;
using decode::power_of_two;
using decode::shared_address;

constexpr int WARPS = HOST_WARPS, BLOCK = 32 * WARPS, STAGES = HOST_STAGES, KEYS = 64;
static_assert(KEYS == HOST_KEYS, "the host counts tiles");

// Of heads padded to SIZE elements: a warp has TILES times 16 queries, and reads each key from shared memory for all of
// them. No bit depends on TILES. Rows in shared memory are 16 bytes longer than a head, so that neighbouring ones, of which
// there is an odd number of 16 bytes each, lie in different banks.
template <int SIZE_, int TILES_> struct Shape {
    static constexpr int SIZE = SIZE_, TILES = TILES_, ROWS = 16 * TILES * WARPS;
    static constexpr int STEPS = SIZE / 16, CHUNKS = SIZE / 8, ROW_BYTES = 2 * (SIZE + 8);
    static constexpr int TILE_BYTES = ROW_BYTES * KEYS;
    static constexpr int BLOCKS = TILES == 2 || SIZE > 80 ? 2 : 3;  // that registers leave room for
    using Scores = float[TILES][KEYS / 8][4];
    static __device__ __forceinline__ unsigned offset(int row, int chunk) { return ROW_BYTES * row + 16 * chunk; }
};

// Begins to copy ROWS rows of `size` elements each; zeros stand behind `size`, and from row `exist` on.
template <typename T, typename Its, int ROWS>
__device__ __forceinline__ void load_rows(unsigned target, const T* source, int exist, int size) {
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * Its::CHUNKS; i += BLOCK) {
        const int row = i / Its::CHUNKS, chunk = i % Its::CHUNKS;
        const bool exists = row < exist && 8 * chunk < size;
        const T* own = source + static_cast<size_t>(row) * size + 8 * chunk;
        decode::copy_async_16(target + Its::offset(row, chunk), exists ? own : source, exists);
    }
}

// Which keys of each tile of a window are visible, a bit each; the whole block calls it. visible null: all of `rows`.
__device__ __forceinline__ void find_visible(unsigned (*tiles)[2], const unsigned char* visible, int count, int rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int part = warp; part < 2 * count; part += WARPS) {
        const int key = 32 * part + lane;
        const bool sees = key < rows && (visible == nullptr || __ldcg(visible + key) != 0);
        const unsigned bits = __ballot_sync(decode::FULL_WARP, sees);
        if (lane == 0) tiles[part / 2][part % 2] = bits;
    }
}

// A warp's queries: sums, and of the two rows of a lane in each tile, largest score and the lane's part of the total.
template <typename Its> struct Sums {
    float sum[Its::TILES][Its::SIZE / 8][4], largest[Its::TILES][2], total[Its::TILES][2];
};

// Products of a warp's queries and a tile's keys.
template <typename T, typename Its>
__device__ __forceinline__ void compute_scores(
    typename Its::Scores& score, const unsigned (&query)[Its::STEPS][Its::TILES][4], unsigned keys) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < Its::TILES; ++m)
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) score[m][n][i] = 0.f;
#pragma unroll
    for (int k = 0; k < Its::STEPS; ++k)
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) {
            unsigned key[4];
            load_matrices(key, keys + Its::offset(16 * n + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < Its::TILES; ++m) {
                multiply<T>(score[m][2 * n], query[k][m], key[0], key[1]);
                multiply<T>(score[m][2 * n + 1], query[k][m], key[2], key[3]);
            }
        }
}

// Scores of keys that are not visible are below all others.
template <typename Its> __device__ __forceinline__ void hide_keys(typename Its::Scores& score, unsigned low, unsigned high) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
        const unsigned two = (n < 4 ? low : high) >> (8 * (n % 4) + 2 * (threadIdx.x % 4));
#pragma unroll
        for (int m = 0; m < Its::TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!(two >> i % 2 & 1u)) score[m][n][i] = __int_as_float(0xff800000);
    }
}

// Scores become weights; largest scores, totals and sums follow. `scale` is that of powers of two. One key is visible.
template <typename Its>
__device__ __forceinline__ void take_softmax(typename Its::Scores& score, Sums<Its>& sums, float scale) {
    float correction[Its::TILES][2];
    bool changes = false;
#pragma unroll
    for (int m = 0; m < Its::TILES; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = sums.largest[m][half];
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
                largest = fmaxf(largest, fmaxf(score[m][n][2 * half], score[m][n][2 * half + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(decode::FULL_WARP, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(decode::FULL_WARP, largest, 2));
            changes |= largest != sums.largest[m][half];
            correction[m][half] = power_of_two((sums.largest[m][half] - largest) * scale);
            sums.largest[m][half] = largest;
            const float offset = -largest * scale;
            float total = sums.total[m][half] * correction[m][half];
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n) {
                float* two = &score[m][n][2 * half];
                two[0] = power_of_two(fmaf(two[0], scale, offset)), two[1] = power_of_two(fmaf(two[1], scale, offset));
                total += two[0] + two[1];
            }
            sums.total[m][half] = total;
        }
    }
    if (!__any_sync(decode::FULL_WARP, changes)) return;  // all corrections are 1
#pragma unroll
    for (int m = 0; m < Its::TILES; ++m)
#pragma unroll
        for (int n = 0; n < Its::SIZE / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums.sum[m][n][i] *= correction[m][i / 2];
}

// Adds the values that stand at a tile's keys, weighted.
template <typename T, typename Its>
__device__ __forceinline__ void add_values(Sums<Its>& sums, const typename Its::Scores& weight, unsigned values) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
        unsigned weights[Its::TILES][4];
#pragma unroll
        for (int m = 0; m < Its::TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* two = &weight[m][2 * k + i / 2][i % 2 * 2];
                weights[m][i] = pack<T>(two[0], two[1]);
            }
#pragma unroll
        for (int n = 0; n < Its::SIZE / 16; ++n) {
            unsigned value[4];
            load_transposed_matrices(value, values + Its::offset(16 * k + lane % 16, 2 * n + lane / 16));
#pragma unroll
            for (int m = 0; m < Its::TILES; ++m) {
                multiply<T>(sums.sum[m][2 * n], weights[m], value[0], value[1]);
                multiply<T>(sums.sum[m][2 * n + 1], weights[m], value[2], value[3]);
            }
        }
    }
}

// A warp's results to shared memory, then from there to the rows of `context`, `stride` apart.
template <typename T, typename Its>
__device__ __forceinline__ void write_results(
    Sums<Its>& sums, char* results, T* context, size_t stride, int exist, int size) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < Its::TILES; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = sums.total[m][half];
            total += __shfl_xor_sync(decode::FULL_WARP, total, 1);
            total += __shfl_xor_sync(decode::FULL_WARP, total, 2);
            const float inverse = total > 0.f ? 1.f / total : 0.f;
            const int row = 16 * m + 8 * half + lane / 4;
#pragma unroll
            for (int n = 0; n < Its::SIZE / 8; ++n) {
                const float* two = &sums.sum[m][n][2 * half];
                *reinterpret_cast<unsigned*>(results + Its::offset(row, n) + lane % 4 * 4) =
                    pack<T>(two[0] * inverse, two[1] * inverse);
            }
        }
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < 16 * Its::TILES * Its::CHUNKS; i += 32) {
        const int row = i / Its::CHUNKS, chunk = i % Its::CHUNKS;
        if (row < exist && 8 * chunk < size)
            *reinterpret_cast<uint4*>(context + row * stride + 8 * chunk) =
                *reinterpret_cast<const uint4*>(results + Its::offset(row, chunk));
    }
}

// Grid: heads, blocks of a window's queries, windows.
template <typename T, int SIZE, int TILES>
__global__ void __launch_bounds__(BLOCK, (Shape<SIZE, TILES>::BLOCKS))
    attention(const __grid_constant__ AttentionArguments arguments) {
    using Its = Shape<SIZE, TILES>;
    constexpr int VISIBLE = 2 * STAGES * Its::TILE_BYTES;  // where bits of keys stand, behind two stages of keys and values
    static_assert(VISIBLE == HOST_BYTES, "shared memory as the host counts it");
    static_assert(STAGES == 2 && Its::ROWS <= 2 * KEYS, "queries, then results, have room in a stage");
    extern __shared__ __align__(128) char memory[];
    const int size = arguments.D, rows = arguments.window, tiles = (rows + KEYS - 1) / KEYS;
    const int head = blockIdx.x, first_query = blockIdx.y * Its::ROWS, warp_row = threadIdx.x / 32 * 16 * TILES;
    const size_t first = static_cast<size_t>(blockIdx.z) * rows;  // of the window
    const T* const own_heads = reinterpret_cast<const T*>(arguments.heads);
    auto rows_of = [&](int which) {
        return own_heads + ((static_cast<size_t>(which) * arguments.G + head) * arguments.R + first) * size;
    };
    const T *const all_keys = rows_of(1), *const all_values = rows_of(2);
    const unsigned ring = shared_address(memory), queries = ring + 2 * Its::TILE_BYTES;  // in the second stage, at first
    unsigned (*const visible)[2] = reinterpret_cast<unsigned (*)[2]>(memory + VISIBLE);
    launch_next_kernel();
    wait_for_previous_kernel();

    auto load_tile = [&](int tile, int stage) {
        const unsigned target = ring + stage * 2 * Its::TILE_BYTES;
        const size_t begin = static_cast<size_t>(tile) * KEYS * size;
        load_rows<T, Its, KEYS>(target, all_keys + begin, rows - tile * KEYS, size);
        load_rows<T, Its, KEYS>(target + Its::TILE_BYTES, all_values + begin, rows - tile * KEYS, size);
        decode::commit_copies();
    };
    load_rows<T, Its, Its::ROWS>(queries, rows_of(0) + static_cast<size_t>(first_query) * size, rows - first_query, size);
    decode::commit_copies();
    find_visible(visible, arguments.visible == nullptr ? nullptr : arguments.visible + first, tiles, rows);
    __syncthreads();
    auto next_visible = [&](int tile) {
        while (tile < tiles && (visible[tile][0] | visible[tile][1]) == 0u) ++tile;
        return tile;
    };
    int tile = next_visible(0), stage = 0;
    if (tile < tiles) load_tile(tile, 0);

    const int lane = threadIdx.x % 32;
    const bool exists = first_query + warp_row < rows;
    const float scale = static_cast<float>(arguments.scale) * 1.4426950408889634f;
    Sums<Its> sums;
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) sums.largest[m][half] = __int_as_float(0xff800000), sums.total[m][half] = 0.f;
#pragma unroll
        for (int n = 0; n < SIZE / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums.sum[m][n][i] = 0.f;
    }
    unsigned query[Its::STEPS][TILES][4];
    decode::wait_for_copies<0>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < Its::STEPS; ++k)
#pragma unroll
        for (int m = 0; m < TILES; ++m)
            load_matrices(query[k][m], queries + Its::offset(warp_row + 16 * m + lane % 16, 2 * k + lane / 16));
#pragma unroll 1
    while (tile < tiles) {
        const unsigned keys = ring + stage * 2 * Its::TILE_BYTES, low = visible[tile][0], high = visible[tile][1];
        decode::wait_for_copies<0>();
        __syncthreads();  // this tile is there, and the place of the one before is free
        tile = next_visible(tile + 1), stage = (stage + 1) % STAGES;
        if (tile < tiles) load_tile(tile, stage);
        if (!exists) continue;
        float score[TILES][KEYS / 8][4];
        compute_scores<T, Its>(score, query, keys);
        if ((low & high) != 0xffffffffu) hide_keys<Its>(score, low, high);
        take_softmax<Its>(score, sums, scale);
        add_values<T, Its>(sums, score, keys + Its::TILE_BYTES);
    }
    __syncthreads();  // no warp reads keys any more
    if (!exists) return;
    T* const context = reinterpret_cast<T*>(arguments.context) + (first + first_query + warp_row) * arguments.E + head * size;
    write_results<T, Its>(
        sums, memory + Its::ROW_BYTES * warp_row, context, arguments.E, rows - first_query - warp_row, size);
}

}  // namespace encoder
