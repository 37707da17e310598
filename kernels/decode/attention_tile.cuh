// Attention of 16 rows over tiles of keys, on tensor cores, by a warp of its own or by warps that share the tile: softmax
// of the scores, weighted values.
#pragma once
#include "decode/attention_heads.cuh"
#include "decode/attention_scores.cuh"

namespace decode {
namespace keys_by_position {

// Of a lane's two rows, the softmax of a span so far: largest score (log2), sum of weights; and what sums of the span's
// earlier tiles are multiplied by.
struct Softmax {
    float maximum[2], total[2], correction[2];
};

// A warp's tile of a round: what it is of its span, its place in the ring, and its weights.
struct Tile {
    int begin, ring_row;
    bool is_first, is_last;
    unsigned weight[BLOCKS][4];
};

// Scales of the values that a lane's row number HALF has at keys 8 n + 2 (lane % 4) and + 1 of a tile.
template <int HALF, typename T, int STEPS>
__device__ __forceinline__ void read_value_scales(float2 (&scale)[2 * BLOCKS], const Block<T, STEPS>& block,
                                                  const Rows& rows, const Tile& tile) {
    const int column = 2 * (threadIdx.x % 4), begin = tile.begin + column;
    const float* of_ring = block.scales + block.ring + tile.ring_row + column;
#pragma unroll
    for (int n = 0; n < 2 * BLOCKS; ++n) scale[n] = *reinterpret_cast<const float2*>(of_ring + 8 * n);
    if (tile.begin + KEY_TILE <= block.start) return;
    if constexpr (ONE_TOKEN) {  // keys behind the new one have weights of zero
        const float own = block.scales[2 * block.ring + new_scales_of(block.tokens)];
#pragma unroll
        for (int n = 0; n < 2 * BLOCKS; ++n) {
            if (begin + 8 * n == block.start) scale[n].x = own;
            if (begin + 8 * n + 1 == block.start) scale[n].y = own;
        }
        return;
    }
    const unsigned char* nodes = block.tables->nodes[max(rows.token[HALF], 0)];
    const float* of_new = block.scales + 2 * block.ring + new_scales_of(block.tokens);
    auto find = [&](float of_tile, int key) {
        const int place = key - block.start, node = nodes[min(max(place, 0), block.tokens - 1)];
        const float own = of_new[key < rows.length[HALF] ? node : 0];
        return place < 0 ? of_tile : own;
    };
#pragma unroll
    for (int n = 0; n < 2 * BLOCKS; ++n)
        scale[n].x = find(scale[n].x, begin + 8 * n), scale[n].y = find(scale[n].y, begin + 8 * n + 1);
}

// Makes weights of the scores of a lane's row number HALF, as the next product takes them; `total` begins with the span's.
// Where values have scales, these come in, and `total` is the lane's part.
template <int HALF, typename T, int STEPS>
__device__ __forceinline__ void compute_weights(Tile& tile, float (&total)[4], Softmax& softmax,
                                                const float (&score)[2 * BLOCKS][4], const Block<T, STEPS>& block,
                                                const Rows& rows) {
    const float largest = largest_score<HALF>(score);
    const float before = tile.is_first ? LOWEST : softmax.maximum[HALF], maximum = fmaxf(before, largest * block.scale);
    softmax.maximum[HALF] = maximum;
    softmax.correction[HALF] = power_of_two(before - maximum);
    total[2 * HALF] = total[2 * HALF + 1] = tile.is_first ? 0.f : softmax.total[HALF] * softmax.correction[HALF];
    float2 scale[2 * BLOCKS];
    if constexpr (INT8) read_value_scales<HALF>(scale, block, rows, tile);
#pragma unroll
    for (int n = 0; n < 2 * BLOCKS; ++n)
        weigh_two<HALF, INT8>(tile.weight, total[2 * HALF], score, n, block.scale, maximum, scale[n], T());
    if (INT8 && tile.is_last) total[2 * HALF] = sum_of_row(total[2 * HALF]);
}

// Whether the weights are added by who adds the values of chunk number CHUNK. (Of int8 they are not those of values.)
template <int CHUNK> constexpr bool ADDS_WEIGHTS = !INT8 && (CHUNK == 0 || TILE_WARPS > 1);

// The steps of columns of chunk number CHUNK that a head has; of warps that share a tile, what the first one has.
template <int CHUNK, int STEPS>
constexpr int COLUMNS_OF = STEPS - 4 * CHUNK < CHUNK_STEPS<STEPS> ? STEPS - 4 * CHUNK : CHUNK_STEPS<STEPS>;

// Adds to `sum` the values of a tile, so weighted, and to `total` the weights: of a chunk of columns. The keys are the same for
// all rows.
template <int CHUNK, typename T, int STEPS>
__device__ __forceinline__ void add_values(Chunk<STEPS>& sum, float (&total)[4], const unsigned (&weight)[BLOCKS][4],
                                           const Block<T, STEPS>& block, int begin, int ring_row) {
    constexpr int COLUMNS = COLUMNS_OF<CHUNK, STEPS>;
    constexpr int LOADS = (COLUMNS + BLOCKS_AT_ONCE - 1) / BLOCKS_AT_ONCE;
    const unsigned values = shared_address(block.keys + block.template chunk_begin<CHUNK>()) + threadIdx.x % 32 / 16 * 16;
    unsigned value[2][LOADS][4];
    auto load = [&](int n) {
        const int key = BLOCK * n + threadIdx.x % 16, node = begin + key - block.start;
        const bool is_new = node >= 0 && node < block.tokens;
        const int row = is_new ? block.new_values_row() + node : block.values_row() + ring_row + key;
#pragma unroll
        for (int d = 0; d < LOADS; ++d) load_transposed_matrices(value[n % 2][d], values + block.bytes(row) + block_place<COLUMNS>(d));
    };
    load(0);
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) {
        if (n + 1 < BLOCKS) load(n + 1);
        if (ADDS_WEIGHTS<CHUNK>) multiply<T>(total, weight[n], Ones<T>::PAIR, Ones<T>::PAIR);
#pragma unroll
        for (int d = 0; d < COLUMNS; ++d) {
            unsigned its[4];
            fragment_of(its, block, value[n % 2][d / BLOCKS_AT_ONCE], d % BLOCKS_AT_ONCE);
            multiply<T>(sum[2 * d], weight[n], its[0], its[1]);
            multiply<T>(sum[2 * d + 1], weight[n], its[2], its[3]);
        }
    }
}

// The same where tokens have new keys of their own: the weights of a token's rows alone meet its values.
template <int CHUNK, typename T, int STEPS>
__device__ __forceinline__ void add_own_values(Chunk<STEPS>& sum, float (&total)[4], const unsigned (&weight)[BLOCKS][4],
                                               const Block<T, STEPS>& block, const Rows& rows, int begin, int ring_row) {
    constexpr int COLUMNS = COLUMNS_OF<CHUNK, STEPS>;
    constexpr int LOADS = (COLUMNS + BLOCKS_AT_ONCE - 1) / BLOCKS_AT_ONCE;
    const unsigned values = shared_address(block.keys + block.template chunk_begin<CHUNK>()) + threadIdx.x % 32 / 16 * 16;
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) {
        const int first = begin + BLOCK * n, key = BLOCK * n + threadIdx.x % 16, node = begin + key - block.start;
        const bool is_shared = first + BLOCK <= block.start || first >= rows.longest;
        if (ADDS_WEIGHTS<CHUNK>) multiply<T>(total, weight[n], Ones<T>::PAIR, Ones<T>::PAIR);
        auto row_of = [&](int t) {
            const int place = min(max(node, 0), block.tokens - 1), own = block.tables->nodes[t][place];
            const bool is_new = node >= 0 && begin + key < block.tables->lengths[t];
            return is_new ? block.new_values_row() + own : block.values_row() + ring_row + key;
        };
        const int last = is_shared ? rows.first_token : rows.end_token - 1;
        int next = row_of(rows.first_token);
#pragma unroll 1
        for (int t = rows.first_token; t <= last; ++t) {
            unsigned own[4], value[LOADS][4];
#pragma unroll
            for (int d = 0; d < LOADS; ++d) load_transposed_matrices(value[d], values + block.bytes(next) + block_place<COLUMNS>(d));
            next = row_of(min(t + 1, last));
#pragma unroll
            for (int i = 0; i < 4; ++i) own[i] = is_shared || rows.token[i % 2] == t ? weight[n][i] : 0u;
#pragma unroll
            for (int d = 0; d < COLUMNS; ++d) {
                unsigned its[4];
                fragment_of(its, block, value[d / BLOCKS_AT_ONCE], d % BLOCKS_AT_ONCE);
                multiply<T>(sum[2 * d], own, its[0], its[1]);
                multiply<T>(sum[2 * d + 1], own, its[2], its[3]);
            }
        }
    }
}

// Where a lane leaves the sums of a span's tiles for the next one of them.
template <typename T, int STEPS> __device__ __forceinline__ float* unfinished_of(const Block<T, STEPS>& block, int half) {
    return block.unfinished + (block.warp * ROWS + threadIdx.x % 32 / 4 + 8 * half) * state_stride_of(block.size);
}

// The sums of a span with a tile: of a chunk of columns. A warp that has no others still has those of the tiles before.
template <int CHUNK, typename T, int STEPS>
__device__ __forceinline__ void compute_sums(Chunk<STEPS>& sum, float (&total)[4], const Block<T, STEPS>& block,
                                             const Rows& rows, const Softmax& softmax, const Tile& tile) {
    constexpr int EIGHTS = 2 * CHUNK_STEPS<STEPS>;
    if (TILE_WARPS == 1 || tile.is_first) {
#pragma unroll
        for (int d = 0; d < EIGHTS; ++d) sum[d][0] = sum[d][1] = sum[d][2] = sum[d][3] = 0.f;
    } else {
#pragma unroll
        for (int d = 0; d < EIGHTS; ++d) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[d][i] *= softmax.correction[i / 2];
        }
    }
    if (TILE_WARPS == 1 && !tile.is_first) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* before = unfinished_of(block, half) + 64 * CHUNK;
#pragma unroll
            for (int d = 0; d < EIGHTS; ++d) {
                if (!block.has_eight(8 * CHUNK + d)) continue;
                const float2 two = *reinterpret_cast<const float2*>(before + column_of<INT8>(d));
                neighbour<0, INT8>(sum, d, half) = two.x * softmax.correction[half];
                neighbour<1, INT8>(sum, d, half) = two.y * softmax.correction[half];
            }
        }
    }
    if (ONE_TOKEN || tile.begin + KEY_TILE <= block.start || block.masks_all)
        add_values<CHUNK>(sum, total, tile.weight, block, tile.begin, tile.ring_row);
    else add_own_values<CHUNK>(sum, total, tile.weight, block, rows, tile.begin, tile.ring_row);
}

// Adds the sums of a span that is complete to the row's, where the warp has all spans of its rows.
template <int CHUNK, int STEPS, int EIGHTS>
__device__ __forceinline__ void add_sums(Whole<STEPS>& whole, const float (&sum)[EIGHTS][4], const float2 (&factors)[2]) {
    constexpr int FIRST = TILE_WARPS == 1 ? 8 * CHUNK : 0;
#pragma unroll
    for (int d = 0; d < EIGHTS && FIRST + d < 2 * STEPS; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) add_part(whole.sum[FIRST + d][i], sum[d][i], factors[i / 2]);
    }
}

// Leaves the sums at a lane's two rows' targets (null: nowhere).
template <int CHUNK, typename T, int STEPS>
__device__ __forceinline__ void write_sums(float* const (&targets)[2], const Chunk<STEPS>& sum,
                                           const Block<T, STEPS>& block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (targets[half] == nullptr) continue;
        const int begin = block.PART * block.part() + block.template chunk_begin<CHUNK>();
        float* target = targets[half] + begin;
#pragma unroll
        for (int d = 0; d < 2 * CHUNK_STEPS<STEPS>; ++d)
            if (block.has_eight(begin / 8 + d))
                *reinterpret_cast<float2*>(target + column_of<INT8>(d)) =
                    make_float2(neighbour<0, INT8>(sum, d, half), neighbour<1, INT8>(sum, d, half));
    }
}

// The sums of a chunk of columns: to `whole` (of a span that is complete, where the warp has all of them) or to the targets.
template <int CHUNK, typename T, int STEPS, typename Sums>
__device__ __forceinline__ void compute_chunk(Sums& whole, Chunk<STEPS>& sum, float (&total)[4], float* const (&targets)[2],
                                              const float2 (&factors)[2], const Block<T, STEPS>& block, const Rows& rows,
                                              const Softmax& softmax, const Tile& tile) {
    compute_sums<CHUNK>(sum, total, block, rows, softmax, tile);
    if constexpr (sizeof(Sums) == sizeof(Whole<OWN_STEPS<STEPS>>)) {
        if (tile.is_last) add_sums<CHUNK>(whole, sum, factors);
        else write_sums<CHUNK>(targets, sum, block);
    } else {
        write_sums<CHUNK>(targets, sum, block);
    }
}

// The sums of all columns from chunk number CHUNK on, of warps that share a tile each one's: `kept` from one tile to the next.
template <int CHUNK, typename T, int STEPS, typename Sums>
__device__ __forceinline__ void compute_chunks(Sums& whole, Chunk<STEPS>& kept, float (&total)[4],
                                               float* const (&targets)[2], const float2 (&factors)[2],
                                               const Block<T, STEPS>& block, const Rows& rows, const Softmax& softmax,
                                               const Tile& tile) {
    if constexpr (TILE_WARPS == 1) {
        Chunk<STEPS> sum;
        compute_chunk<CHUNK>(whole, sum, total, targets, factors, block, rows, softmax, tile);
    } else if (CHUNK_STEPS<STEPS> * TILE_WARPS == block.PART_STEPS || CHUNK_STEPS<STEPS> * block.member < block.PART_STEPS) {
        compute_chunk<CHUNK>(whole, kept, total, targets, factors, block, rows, softmax, tile);
    }
    if constexpr (TILE_WARPS == 1 && 4 * (CHUNK + 1) < STEPS)
        compute_chunks<CHUNK + 1>(whole, kept, total, targets, factors, block, rows, softmax, tile);
}

// The warp's tile of a round: scores, weights, weighted values. The state of a span that ends with it is added to `whole`
// where the warp has all spans of its rows, else it is left where they are merged.
template <typename T, int STEPS, typename Sums>
__device__ __forceinline__ void compute_tile(Sums& whole, Chunk<STEPS>& kept, Softmax& softmax,
                                             const Block<T, STEPS>& block, const Rows& rows, const Division& division,
                                             int round, int stage) {
    constexpr bool SHARES = sizeof(Sums) < sizeof(Whole<OWN_STEPS<STEPS>>);
    const int number = block.tile_of(division, block.slot, round);
    const int of_span = number & ((1 << division.tile_bits) - 1), span = number >> division.tile_bits;
    Tile tile{number * KEY_TILE, (stage * block.slots + block.slot) * KEY_TILE};
    if (number < 0 || tile.begin >= rows.longest) return;
    tile.is_first = of_span == 0;
    tile.is_last = of_span + 1 == 1 << division.tile_bits || tile.begin + KEY_TILE >= rows.longest;
    float total[4] = {};
    {
        float score[2 * BLOCKS][4];
        compute_scores(score, block, rows, tile.begin, tile.ring_row,
                       [&] { load_tiles<true, false, 1>(block, division, round, stage); });
        if constexpr (IN_TURN) load_tiles<false, true>(block, division, round, stage);  // all warps have read the keys
#pragma unroll
        for (int n = 0; n < BLOCKS; ++n) tile.weight[n][1] = tile.weight[n][3] = 0u;
        read_scores<0>(score, block);
        compute_weights<0>(tile, total, softmax, score, block, rows);
        if (rows.has_more) {
            read_scores<1>(score, block);
            compute_weights<1>(tile, total, softmax, score, block, rows);
        }
    }
    float* targets[2] = {};
    float2 factors[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (!tile.is_last) targets[half] = TILE_WARPS == 1 ? unfinished_of(block, half) : nullptr;
        else if constexpr (!SHARES) factors[half] = next_maximum(whole.maximum[half], softmax.maximum[half]);
        else if (rows.length[half] > (ONE_TOKEN ? 0 : (span << division.tile_bits) * KEY_TILE))
            targets[half] = block.state_of(rows.row[half], span) + 4;
    }
    if constexpr (IN_TURN) {
        wait_for_copies<0>();
        block.wait_for_tile();
    }
    compute_chunks<0>(whole, kept, total, targets, factors, block, rows, softmax, tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        softmax.total[half] = total[2 * half];
        if (!tile.is_last) continue;
        if constexpr (!SHARES) add_part(whole.total[half], total[2 * half], factors[half]);
        else if (targets[half] != nullptr && threadIdx.x % 4 == 0 && block.member == 0)
            *reinterpret_cast<float2*>(targets[half] - 4) = make_float2(softmax.maximum[half], total[2 * half]);
    }
}

}  // namespace keys_by_position
}  // namespace decode
