// Attention of 16 rows over tiles of keys, on tensor cores, by a warp of its own: scores, softmax, weighted values.
#pragma once
#include "decode/attention_states.cuh"

namespace decode {
namespace keys_by_position {

// Four 8 x 8 matrices of 16-bit elements, one to a register; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(unsigned (&fragment)[4], unsigned shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(shared)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_transposed_matrices(unsigned (&fragment)[4], unsigned shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(shared)
                 : "memory");
}

// Of a key that is not seen: minus infinity.
__device__ __forceinline__ float no_score() { return __int_as_float(0xff800000); }

template <typename T>
__device__ __forceinline__ void multiply(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned lower[2] = {a[0], a[1]}, upper[2] = {a[2], a[3]};
    multiply_add(sum, lower, upper, b0, b1, T());
}

template <typename T> struct Ones;
template <> struct Ones<__half> { static constexpr unsigned PAIR = 0x3c003c00u; };
template <> struct Ones<__nv_bfloat16> { static constexpr unsigned PAIR = 0x3f803f80u; };

// A lane's two rows, lane / 4 of the warp's tile and the one 8 further: the token (-1: none), the row among the block's,
// and the token's keys (0: none here). And what all rows of the tile have: its tokens, the most keys.
struct Rows {
    int token[2], row[2], length[2];
    int first_token, end_token, longest;
};

template <typename T> __device__ __forceinline__ Rows rows_of(const Block<T>& block, const Division& division) {
    Rows rows;
    rows.first_token = block.row_tile * block.tile_tokens;
    rows.end_token = min(rows.first_token + block.tile_tokens, block.own_count);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = threadIdx.x % 32 / 4 + 8 * half, token = rows.first_token + block.token_of(row);
        const bool exists = token < rows.end_token;
        rows.token[half] = exists ? token : -1, rows.row[half] = rows.first_token * block.group + row;
        const int length = exists ? block.tables->lengths[token] : 0;
        rows.length[half] = exists && tile_bits_of(length, block.span_bits) == division.tile_bits ? length : 0;
    }
    rows.longest = __reduce_max_sync(FULL_WARP, max(rows.length[0], rows.length[1]));
    return rows;
}

// Begins to copy the tiles of a round to the ring. Rows before `start` were written in earlier steps, so they may be read
// before the previous kernel is done. Behind them stand zeros: a weight of 0 must meet the same value wherever a token
// stands.
template <typename T, int STEPS>
__device__ __forceinline__ void load_tiles(const Block<T>& block, const Division& division, int round) {
    constexpr int LANES_OF_ROW = 2 * STEPS;
    const int column = threadIdx.x % LANES_OF_ROW * 8, rows_at_once = blockDim.x / LANES_OF_ROW;
    if (round < division.rounds && column < block.padded) {
        const int stage = round % block.stages * block.slots * KEY_TILE;
#pragma unroll 4
        for (int row = threadIdx.x / LANES_OF_ROW; row < block.slots * KEY_TILE; row += rows_at_once) {
            const int tile = block.tile_of(division, row / KEY_TILE, round), position = tile * KEY_TILE + row % KEY_TILE;
            if (tile < 0) continue;
            const bool exists = position < block.start && column < block.size;
            const size_t source = exists ? static_cast<size_t>(position) * block.size + column : 0;
            const unsigned target = shared_address(block.keys + (stage + row) * block.stride + column);
            copy_async_16(target, block.cached_keys + source, exists);
            copy_async_16(target + block.bytes(block.ring), block.cached_values + source, exists);
        }
    }
    commit_copies();
}

// Products of the warp's 16 queries and the first `count` times 16 keys of a tile. A lane gets, of its two rows, those of
// keys 2 (lane % 4) and + 1 of each 8.
template <typename T, int STEPS>
__device__ __forceinline__ void multiply_queries(float (&score)[2 * BLOCKS][4], const Block<T>& block, const T* keys, int count) {
    const int lane = threadIdx.x % 32;
    // Lane i reads row i % 16 of 16, columns of its lower half for i < 16.
    const unsigned own = block.bytes(lane % 16) + lane / 16 * 16;
    const unsigned query_row = shared_address(block.queries + block.row_tile * ROWS * block.stride) + own;
    const unsigned key_row = shared_address(keys) + own;
#pragma unroll
    for (int n = 0; n < 2 * BLOCKS; ++n)
        score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.f;
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        if (16 * k >= block.size) continue;
        unsigned query[4];
        load_matrices(query, query_row + 32 * k);
#pragma unroll
        for (int n = 0; n < BLOCKS; ++n) {
            if (n >= count) continue;
            unsigned key[4];
            load_matrices(key, key_row + block.bytes(BLOCK * n) + 32 * k);
            multiply<T>(score[2 * n], query, key[0], key[2]);
            multiply<T>(score[2 * n + 1], query, key[1], key[3]);
        }
    }
}

// Of a lane's two rows, whether the keys of a tile are seen in a step whose mask speaks of all rows: bit 8 n + i for key
// 8 n + 2 (lane % 4) + i.
template <typename T>
__device__ __forceinline__ void read_mask(unsigned long long (&sees)[2], const Block<T>& block, const Rows& rows, int begin) {
    const int lane = threadIdx.x % 32;
#pragma unroll 4
    for (int t = rows.first_token; t < rows.end_token; ++t) {
        const unsigned char* mask = block.mask_of(t);
        unsigned bits[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int key = begin + 32 * half + lane;
            const bool is_seen = key == block.start + block.first_token + t || (key < block.mask_keys && __ldcg(mask + key) != 0);
            bits[half] = __ballot_sync(FULL_WARP, is_seen);
        }
        const unsigned long long both = (static_cast<unsigned long long>(bits[1]) << 32 | bits[0]) >> 2 * (lane % 4);
        if (rows.token[0] == t) sees[0] = both;
        if (rows.token[1] == t) sees[1] = both;
    }
}

// Scores of a tile whose first key is at `begin`; ring_row: of that key in the ring.
template <typename T, int STEPS>
__device__ __forceinline__ void compute_scores(float (&score)[2 * BLOCKS][4], const Block<T>& block, const Rows& rows,
                                               int begin, int ring_row) {
    const int lane = threadIdx.x % 32, stride = score_stride_of(block.tokens);
    const bool has_new = begin + KEY_TILE > block.start;
    float* of_rows = block.new_scores + (block.row_tile * ROWS + lane / 4) * stride;
    if (has_new && begin <= block.start) {  // once for all tokens: they are the same wherever a token stands
        multiply_queries<T, STEPS>(score, block, block.new_keys, (block.tokens + BLOCK - 1) / BLOCK);
#pragma unroll
        for (int n = 0; n < 2 * BLOCKS; ++n) {
            if (8 * n >= block.tokens) continue;
            float* target = of_rows + 8 * n + 2 * (lane % 4);
            *reinterpret_cast<float2*>(target) = make_float2(score[n][0], score[n][1]);
            *reinterpret_cast<float2*>(target + 8 * stride) = make_float2(score[n][2], score[n][3]);
        }
        __syncwarp();
    }
    multiply_queries<T, STEPS>(score, block, block.keys + ring_row * block.stride,
                               min(block.start - begin + BLOCK - 1, KEY_TILE) / BLOCK);
    if (has_new) {
#pragma unroll
        for (int n = 0; n < 2 * BLOCKS; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int half = i / 2, position = begin + 8 * n + 2 * (lane % 4) + i % 2;
                if (position >= rows.length[half]) score[n][i] = no_score();
                else if (position >= block.start)
                    score[n][i] = of_rows[8 * half * stride + block.tables->nodes[rows.token[half]][position - block.start]];
            }
        }
    }
    if (block.masks_all) {
        unsigned long long sees[2] = {};
        read_mask(sees, block, rows, begin);
#pragma unroll
        for (int n = 0; n < 2 * BLOCKS; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if ((sees[i / 2] >> (8 * n + i % 2) & 1) == 0) score[n][i] = no_score();
        }
    }
}

// Of a lane's two rows, the softmax of a span so far: largest score (log2), sum of weights; and what sums of the span's
// earlier tiles are multiplied by.
struct Softmax {
    float maximum[2], total[2], correction[2];
};

// Makes weights of scores, as the next product takes them, and adds them to the span.
template <typename T>
__device__ __forceinline__ void compute_weights(unsigned (&weight)[BLOCKS][4], Softmax& softmax,
                                                const float (&score)[2 * BLOCKS][4], float scale, bool is_first) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = fmaxf(score[0][2 * half], score[0][2 * half + 1]);
#pragma unroll
        for (int n = 1; n < 2 * BLOCKS; ++n) largest = fmaxf(largest, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
        const float before = is_first ? LOWEST : softmax.maximum[half];
        softmax.maximum[half] = fmaxf(before, largest * scale);
        softmax.correction[half] = power_of_two(before - softmax.maximum[half]);
        softmax.total[half] = is_first ? 0.f : softmax.total[half] * softmax.correction[half];
    }
    float total[4] = {softmax.total[0], softmax.total[0], softmax.total[1], softmax.total[1]};
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* two = &score[2 * n + i / 2][2 * (i % 2)];
            weight[n][i] = pack<T>(power_of_two(fmaf(two[0], scale, -softmax.maximum[i % 2])),
                                   power_of_two(fmaf(two[1], scale, -softmax.maximum[i % 2])));
        }
        multiply<T>(total, weight[n], Ones<T>::PAIR, Ones<T>::PAIR);
    }
    softmax.total[0] = total[0], softmax.total[1] = total[2];
}

// Adds 64 columns of a tile's values, from `column` on, so weighted. Where new keys stand, each token has values of its
// own: the weights of its rows alone meet them.
template <typename T>
__device__ __forceinline__ void add_values(float (&sum)[8][4], const unsigned (&weight)[BLOCKS][4], const Block<T>& block,
                                           const Rows& rows, int begin, int ring_row, int column) {
    const int lane = threadIdx.x % 32;
    const unsigned values = shared_address(block.keys) + lane / 16 * 16 + 2 * column;
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) {
        const int first = begin + BLOCK * n, key = BLOCK * n + lane % 16;
        if (first >= rows.longest) continue;
        const bool is_shared = first + BLOCK <= block.start || block.shares_new_keys();
#pragma unroll 1
        for (int t = rows.first_token; t < rows.end_token; ++t) {
            int row = block.ring + ring_row + key;
            if (first + BLOCK > block.start) {
                const int length = block.tables->lengths[t], node = begin + key - block.start;
                if (first >= length) continue;
                if (node >= 0 && begin + key < length) row = 2 * block.ring + block.tokens + block.tables->nodes[t][node];
            }
            unsigned own[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) own[i] = is_shared || rows.token[i % 2] == t ? weight[n][i] : 0u;
#pragma unroll
            for (int d = 0; d < 4; ++d) {
                if (column + 16 * d >= block.size) continue;
                unsigned value[4];
                load_transposed_matrices(value, values + block.bytes(row) + 32 * d);
                multiply<T>(sum[2 * d], own, value[0], value[1]);
                multiply<T>(sum[2 * d + 1], own, value[2], value[3]);
            }
            if (is_shared) break;
        }
    }
}

// Where a lane leaves the sums of a span's tiles for the next one of them.
template <typename T> __device__ __forceinline__ float* unfinished_of(const Block<T>& block, int half) {
    return block.unfinished + (block.warp * ROWS + threadIdx.x % 32 / 4 + 8 * half) * state_stride_of(block.size);
}

// A lane's sums of 64 columns of a span before a tile is added.
template <typename T>
__device__ __forceinline__ void begin_sums(float (&sum)[8][4], const Block<T>& block, const Softmax& softmax, int column,
                                           bool is_first) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float* before = unfinished_of(block, half) + column + 2 * (threadIdx.x % 4);
#pragma unroll
        for (int d = 0; d < 8; ++d) {
            sum[d][2 * half] = sum[d][2 * half + 1] = 0.f;
            if (is_first || column + 8 * d >= block.size) continue;
            const float2 two = *reinterpret_cast<const float2*>(before + 8 * d);
            sum[d][2 * half] = two.x * softmax.correction[half], sum[d][2 * half + 1] = two.y * softmax.correction[half];
        }
    }
}

// Leaves a lane's sums of 64 columns at its two rows' targets (null: nowhere).
__device__ __forceinline__ void write_sums(float* const (&targets)[2], const float (&sum)[8][4], int column, int size) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (targets[half] == nullptr) continue;
#pragma unroll
        for (int d = 0; d < 8; ++d) {
            const int own = column + 8 * d;
            if (own < size)
                *reinterpret_cast<float2*>(targets[half] + own + 2 * (threadIdx.x % 4)) =
                    make_float2(sum[d][2 * half], sum[d][2 * half + 1]);
        }
    }
}

// The warp's tile of a round: scores, weights, weighted values. The state of a span that ends with it is added to `whole`
// where the warp has all spans of its rows, else it is left where they are merged.
template <typename T, int STEPS, typename Sums>
__device__ __forceinline__ void compute_tile(Sums& whole, Softmax& softmax, const Block<T>& block, const Rows& rows,
                                             const Division& division, int round) {
    constexpr bool SHARES = sizeof(Sums) < sizeof(Whole<STEPS>);
    const int tile = block.tile_of(division, block.slot, round), begin = tile * KEY_TILE;
    if (tile < 0 || begin >= rows.longest) return;
    const int of_span = tile & ((1 << division.tile_bits) - 1), span = tile >> division.tile_bits;
    const int ring_row = (round % block.stages * block.slots + block.slot) * KEY_TILE;
    const bool is_first = of_span == 0;
    const bool is_last = of_span + 1 == 1 << division.tile_bits || begin + KEY_TILE >= rows.longest;
    unsigned weight[BLOCKS][4];
    {
        float score[2 * BLOCKS][4];
        compute_scores<T, STEPS>(score, block, rows, begin, ring_row);
        compute_weights<T>(weight, softmax, score, block.scale, is_first);
    }
    float* targets[2] = {};
    float2 factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (!is_last) {
            targets[half] = unfinished_of(block, half);
        } else if constexpr (!SHARES) {
            factors[half] = next_maximum(whole.maximum[half], softmax.maximum[half]);
            add_part(whole.total[half], softmax.total[half], factors[half]);
        } else if (rows.length[half] > (span << division.tile_bits) * KEY_TILE) {
            float* state = block.state_of(rows.row[half], span);
            if (threadIdx.x % 4 == 0) *reinterpret_cast<float2*>(state) = make_float2(softmax.maximum[half], softmax.total[half]);
            targets[half] = state + 4;
        }
    }
#pragma unroll
    for (int chunk = 0; chunk < STEPS / 4; ++chunk) {
        const int column = 64 * chunk;
        if (column >= block.size) continue;
        float sum[8][4];
        begin_sums(sum, block, softmax, column, is_first);
        add_values<T>(sum, weight, block, rows, begin, ring_row, column);
        if constexpr (!SHARES) {
            if (is_last) {
#pragma unroll
                for (int d = 0; d < 8; ++d) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) add_part(whole.sum[8 * chunk + d][i], sum[d][i], factors[i / 2]);
                }
                continue;
            }
        }
        write_sums(targets, sum, column, block.size);
    }
}

}  // namespace keys_by_position
}  // namespace decode
