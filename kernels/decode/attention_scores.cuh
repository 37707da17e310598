// Scores of 16 rows and tiles of keys, on tensor cores, by a warp of its own; and how rows become their operands.
#pragma once
#include "decode/attention_states.cuh"

namespace decode {
namespace keys_by_position {

// A lane's two rows, lane / 4 of the warp's tile and the one 8 further: the token (-1: none), the row among the block's,
// and the token's keys (0: none here). And what all rows of the tile have: its tokens, the most keys, whether there are
// more than 8.
struct Rows {
    int token[2], row[2], length[2];
    int first_token, end_token, longest;
    bool has_more;
};

template <typename T, int STEPS>
__device__ __forceinline__ Rows rows_of(const Block<T, STEPS>& block, const Division& division) {
    Rows rows;
    rows.first_token = block.row_tile * block.tile_tokens;
    rows.end_token = min(rows.first_token + block.tile_tokens, block.own_count);
    rows.has_more = (rows.end_token - rows.first_token) * block.group > 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = threadIdx.x % 32 / 4 + 8 * half, token = rows.first_token + block.token_of(row);
        const bool exists = ONE_TOKEN ? row < block.group : token < rows.end_token;
        rows.token[half] = exists ? token : -1, rows.row[half] = rows.first_token * block.group + row;
        const int length = exists ? block.length_of(token) : 0;
        rows.length[half] = exists && (ONE_TOKEN || block.bits_of(length) == division.tile_bits) ? length : 0;
    }
    rows.longest = ONE_TOKEN ? block.longest : __reduce_max_sync(FULL_WARP, max(rows.length[0], rows.length[1]));
    return rows;
}

// A lane's place among the 16 rows, so many bytes apart, of which it loads matrices: row lane % 16, columns of the lower half
// for lanes below 16.
__device__ __forceinline__ unsigned lane_place(int row_bytes) {
    return threadIdx.x % 16 * row_bytes + threadIdx.x % 32 / 16 * 16;
}

// Blocks of 16 rows and 16 columns of keys or values that four matrices are, and block number `n` of them as operands. Of
// int8, a lane has four neighbours of one key, or two of each of two keys: those of even columns make the first two
// matrices of the operands, the others the last two.
constexpr int BLOCKS_AT_ONCE = INT8 ? 2 : 1;
// From a lane's place on, that of the matrices number `turn` of COUNT blocks of columns; an odd block behind pairs comes twice.
template <int COUNT> __device__ __forceinline__ unsigned block_place(int turn) {
    return 32 * turn - (INT8 && 2 * turn + 1 == COUNT ? threadIdx.x % 32 / 16 * 16 : 0);
}
template <typename T, int STEPS>
__device__ __forceinline__ void fragment_of(unsigned (&fragment)[4], const Block<T, STEPS>& block,
                                            const unsigned (&matrices)[4], int n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (!INT8) fragment[i] = matrices[i];
        else if (i < 2) fragment[i] = pair_of<0>(matrices[2 * n + i], block.number_bits, T());
        else fragment[i] = pair_of<1>(matrices[2 * n + i - 2], block.number_bits, T());
    }
}

// Products of eight keys, from a row of shared memory on, times the scales of these; as scores below a cap. `place`: see
// `multiply_queries`.
template <typename T, int STEPS>
__device__ __forceinline__ void make_scores(float (&score)[4], const Block<T, STEPS>& block, int row, int place = -1) {
    if constexpr (INT8) {
        const int column = 2 * (threadIdx.x % 4);
        float2 scales = *reinterpret_cast<const float2*>(block.scales + row + column);
        if (place == column) scales.x = block.scales[2 * block.ring];
        if (place == column + 1) scales.y = block.scales[2 * block.ring];
#pragma unroll
        for (int i = 0; i < 4; ++i) score[i] *= i % 2 ? scales.y : scales.x;
    }
    if constexpr (CAP) cap_scores(score, block.cap, block.inverse_cap);
}

// Products of the warp's 16 queries and COUNT times 16 keys, added to those of the parts before PART. A lane gets, of its two
// rows, those of keys 2 (lane % 4) and + 1 of each 8. What the next step multiplies is on its way meanwhile. `place`: that of
// the one new token's key among them, which lies elsewhere; -1: nowhere.
template <int COUNT, int PART, typename T, int STEPS>
__device__ __forceinline__ void multiply_queries(float (&score)[2 * COUNT][4], const Block<T, STEPS>& block,
                                                 const CacheElement<T>* keys, int place = -1) {
    constexpr int OWN = Block<T, STEPS>::PART_STEPS;
    const T* queries = block.queries + block.row_tile * ROWS * block.QUERY_STRIDE + block.PART * PART;
    const unsigned query_row = shared_address(queries) + lane_place(block.QUERY_STRIDE * sizeof(T));
    const unsigned key_row = shared_address(keys) + lane_place(block.bytes(1));
    const int new_block = place >= 0 && place % BLOCK == threadIdx.x % 16 ? place / BLOCK : -1;
    const CacheElement<T>* new_key = block.new_keys + (APART ? PART * block.STRIDE : 0);  // of one token
    const unsigned new_row = shared_address(new_key) + threadIdx.x % 32 / 16 * 16;
    constexpr int PLACES = INT8 ? 1 : 2;  // of matrices, where those of bytes are free once they are operands
    unsigned query[2][4], key[PLACES][COUNT][4];
    auto load_key = [&](int k, int n) {
        const int turn = k / BLOCKS_AT_ONCE;
        if (k % BLOCKS_AT_ONCE == 0 && k < OWN)
            load_matrices(key[turn % PLACES][n],
                          (n == new_block ? new_row : key_row + block.bytes(BLOCK * n)) + block_place<OWN>(turn));
    };
    auto load = [&](int k, bool loads_keys) {
        load_matrices(query[k % 2], query_row + 32 * k);
#pragma unroll
        for (int n = 0; n < COUNT; ++n)
            if (loads_keys) load_key(k, n);
    };
    load(0, true);
#pragma unroll
    for (int n = 0; n < 2 * COUNT; ++n)
        if (PART == 0) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.f;
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        if (k + 1 < OWN) load(k + 1, !INT8);
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            unsigned own[4];
            fragment_of(own, block, key[k / BLOCKS_AT_ONCE % PLACES][n], k % BLOCKS_AT_ONCE);
            if (INT8) load_key(k + 1, n);
            multiply<T>(score[2 * n], query[k % 2], own[0], own[2]);
            multiply<T>(score[2 * n + 1], query[k % 2], own[1], own[3]);
        }
    }
}

// Where the scores of the new tokens and a lane's first row are.
template <typename T, int STEPS> __device__ __forceinline__ float* new_scores_of(const Block<T, STEPS>& block) {
    return block.new_scores + (block.row_tile * ROWS + threadIdx.x % 32 / 4) * score_stride_of(block.tokens);
}

// Scores of the new tokens, which are the same wherever a token stands among a row's keys: with a part of their columns, or
// APART with both. The last of warps that share a tile begins, as it has the fewest committed keys.
template <int PART, typename T, int STEPS>
__device__ __forceinline__ void compute_new_scores(const Block<T, STEPS>& block) {
    const int stride = score_stride_of(block.tokens);
    float* of_rows = new_scores_of(block);
#pragma unroll 1
    for (int first = BLOCK * (TILE_WARPS - 1 - block.member); first < block.tokens; first += BLOCK * TILE_WARPS) {
        float score[2][4];
        if constexpr (PART > 0) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float* sums = of_rows + first + 8 * n + 2 * (threadIdx.x % 4);
                score[n][0] = sums[0], score[n][1] = sums[1];
                score[n][2] = sums[8 * stride], score[n][3] = sums[8 * stride + 1];
            }
        }
        multiply_queries<1, PART>(score, block, block.new_keys + first * block.STRIDE);
        if constexpr (APART) multiply_queries<1, 1>(score, block, block.new_keys + (block.tokens + first) * block.STRIDE);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            if (APART || PART + 1 == block.PARTS) make_scores(score[n], block, 2 * block.ring + first + 8 * n);
            float* target = of_rows + first + 8 * n + 2 * (threadIdx.x % 4);
            *reinterpret_cast<float2*>(target) = make_float2(score[n][0], score[n][1]);
            *reinterpret_cast<float2*>(target + 8 * stride) = make_float2(score[n][2], score[n][3]);
        }
    }
    if (IN_TURN) block.wait_for_tile();  // else before they are read
}

// Of a lane's two rows, whether the keys of a tile are seen in a step whose mask speaks of all rows: bit 8 n + i for key
// 8 n + 2 (lane % 4) + i.
template <typename T, int STEPS>
__device__ __forceinline__ void read_mask(unsigned long long (&sees)[2], const Block<T, STEPS>& block, const Rows& rows,
                                          int begin) {
    const int lane = threadIdx.x % 32;
#pragma unroll 4
    for (int t = rows.first_token; t < rows.end_token; ++t) {
        const unsigned char* mask = block.mask_of(t);
        unsigned bits[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int key = begin + 32 * half + lane;
            const bool masks = __ldcg(mask + min(key, block.mask_keys - 1)) != 0 && key < block.mask_keys;
            bits[half] = __ballot_sync(FULL_WARP, masks || key == block.start + block.first_token + t);
        }
        const unsigned long long both = (static_cast<unsigned long long>(bits[1]) << 32 | bits[0]) >> 2 * (lane % 4);
        if (rows.token[0] == t) sees[0] = both;
        if (rows.token[1] == t) sees[1] = both;
    }
}

// Whether the new key is read as if it stood in its tile. In turn, keys of a tile come where it was.
constexpr bool READS_NEW = ONE_TOKEN && !IN_TURN;

// Scores of COUNT blocks of a tile's keys, the first of them at `begin`, in the ring at `ring_row`. `bring`: see
// `compute_scores`.
template <int COUNT, typename T, int STEPS, typename Bring>
__device__ __forceinline__ void compute_scores_of(float (&score)[2 * COUNT][4], const Block<T, STEPS>& block,
                                                  const Rows& rows, int begin, int ring_row, const Bring& bring) {
    const int lane = threadIdx.x % 32, stride = score_stride_of(block.tokens);
    const bool has_new = begin + COUNT * BLOCK > block.start;
    const float* of_rows = new_scores_of(block);
    const int new_place = READS_NEW ? block.start - begin : -1;
    // Of warps that share a tile some may have no keys that exist before; in turn, all of them wait for each other.
    if (TILE_WARPS == 1 || (IN_TURN && block.PARTS > 1) || begin < block.start + READS_NEW) {
        multiply_queries<COUNT, 0>(score, block, block.keys + ring_row * block.STRIDE, new_place);
        if constexpr (APART)
            multiply_queries<COUNT, 1>(score, block, block.keys + (block.ring + ring_row) * block.STRIDE, new_place);
    }
    if constexpr (IN_TURN && Block<T, STEPS>::PARTS > 1) {
        block.wait_for_tile();  // all warps have multiplied the first part
        bring();
        wait_for_copies<0>();
        block.wait_for_tile();
        multiply_queries<COUNT, 1>(score, block, block.keys + ring_row * block.STRIDE);
    }
#pragma unroll
    for (int n = 0; n < 2 * COUNT; ++n) make_scores(score[n], block, ring_row + 8 * n, READS_NEW ? new_place - 8 * n : -1);
    if constexpr (READS_NEW) {
        const int before = WINDOW ? block.longest - block.window - 1 : -1;
        if (!has_new && begin > before) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) hide_scores(score, half, begin, before, block.start);
        return;
    }
    if (!IN_TURN && (begin | (KEY_TILE - 1)) >= block.start) block.wait_for_tile();  // until scores of new keys are there
    if (ONE_TOKEN && has_new) {
#pragma unroll
        for (int n = 0; n < 2 * COUNT; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int place = begin + 8 * n + 2 * (lane % 4) + i % 2 - block.start;
                if (place >= 0) score[n][i] = place == 0 ? of_rows[8 * (i / 2) * stride] : no_score();
            }
        }
    } else if (has_new) {
#pragma unroll
        for (int n = 0; n < 2 * COUNT; ++n) {
            if (begin + 8 * n + 8 <= block.start) continue;
            if (begin + 8 * n >= rows.longest) {
                score[n][0] = score[n][1] = score[n][2] = score[n][3] = no_score();
                continue;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int half = i / 2, position = begin + 8 * n + 2 * (lane % 4) + i % 2, place = position - block.start;
                const unsigned char* nodes = block.tables->nodes[max(rows.token[half], 0)];
                const int node = nodes[min(max(place, 0), block.tokens - 1)];
                const bool exists = position < rows.length[half];
                const float of_node = of_rows[8 * half * stride + (place >= 0 && exists ? node : 0)];
                score[n][i] = !exists ? no_score() : place < 0 ? score[n][i] : of_node;
            }
        }
    }
    if (WINDOW && begin < rows.longest - block.window) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            hide_scores(score, half, begin, rows.length[half] - block.window - 1, 0x7fffffff);
    }
    if (block.masks_all) {
        unsigned long long sees[2] = {};
        read_mask(sees, block, rows, begin);
#pragma unroll
        for (int n = 0; n < 2 * COUNT; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if ((sees[i / 2] >> (8 * n + i % 2) & 1) == 0) score[n][i] = no_score();
        }
    }
}

// Scores of a tile whose first key is at `begin`; ring_row: of that key in the ring. Of warps that share it each computes some
// and leaves them for the others, see `read_scores`; these have read the last tile's by then. `bring`: begins to copy the
// second part of the keys to where the first was.
template <typename T, int STEPS, typename Bring>
__device__ __forceinline__ void compute_scores(float (&score)[2 * BLOCKS][4], const Block<T, STEPS>& block,
                                               const Rows& rows, int begin, int ring_row, const Bring& bring) {
    if (!ONE_TOKEN && !IN_TURN && begin + KEY_TILE > block.start && begin <= block.start) compute_new_scores<0>(block);
    if constexpr (TILE_WARPS == 1) {
        compute_scores_of<BLOCKS>(score, block, rows, begin, ring_row, bring);
    } else {
        constexpr int COUNT = BLOCKS / TILE_WARPS;
        const int first = block.member * COUNT * BLOCK;
        float own[2 * COUNT][4];
        compute_scores_of<COUNT>(own, block, rows, begin + first, ring_row + first, bring);
#pragma unroll
        for (int n = 0; n < 2 * COUNT; ++n) {
            float2* of_rows = block.tile_scores + 32 * (2 * COUNT * block.member + n) + threadIdx.x % 32;
            of_rows[0] = make_float2(own[n][0], own[n][1]);
            of_rows[32 * 2 * BLOCKS] = make_float2(own[n][2], own[n][3]);
        }
        block.wait_for_tile();
    }
}

// Those of a lane's row number HALF, where warps share the tile.
template <int HALF, typename T, int STEPS>
__device__ __forceinline__ void read_scores(float (&score)[2 * BLOCKS][4], const Block<T, STEPS>& block) {
    if constexpr (TILE_WARPS > 1) {
#pragma unroll
        for (int n = 0; n < 2 * BLOCKS; ++n) {
            const float2 two = block.tile_scores[32 * (2 * BLOCKS * HALF + n) + threadIdx.x % 32];
            score[n][2 * HALF] = two.x, score[n][2 * HALF + 1] = two.y;
        }
    }
}

}  // namespace keys_by_position
}  // namespace decode
