// Attention of 16 rows over a tile of keys, on tensor cores: scores, softmax, weighted values.
#pragma once
#include "decode/attention_block.cuh"

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

// A tile of keys for 16 rows, as a lane of a team sees it.
struct Unit {
    int begin, ring_row;         // the position of its first key, and that key's row in the ring
    int first_token, end_token;  // of the rows
    int token[2], length[2];     // of row lane / 4 and of the one 8 further: its token (-1: none), the token's keys

    // Whether 16 keys are the same ones for all tokens.
    template <typename T> __device__ __forceinline__ bool shares(const Block<T>& block, int keys) const {
        return block.masks_all || begin + BLOCK * (keys + 1) <= block.start;
    }
    // Where 16 keys of a token lie: a lane names the row of one of them.
    template <typename T> __device__ __forceinline__ int key_row(const Block<T>& block, int t, int keys) const {
        const int key = BLOCK * keys + threadIdx.x % 16, position = begin + key;
        return position < block.start || position >= block.tables->lengths[t]
                   ? ring_row + key
                   : 2 * block.ring + block.tables->nodes[t][position - block.start];
    }
};

// Begins to copy the tiles of some spans' iteration to the ring, from the span `first_span` of the block's group on. Rows
// before `start` were written in earlier steps, so they may be read before the previous kernel is done. Behind them stand
// zeros: a weight of 0 must meet the same value wherever a token stands.
template <typename T, int STEPS>
__device__ __forceinline__ void load_tiles(const Block<T>& block, int first_span, int iteration, int each) {
    constexpr int LANES_OF_ROW = 2 * STEPS;
    const int column = threadIdx.x % LANES_OF_ROW * 8, rows_at_once = blockDim.x / LANES_OF_ROW;
    if (column < block.padded) {
#pragma unroll 1
        for (int slot = 0; slot < block.slots; ++slot) {
            const int first_row = ((block.split * GROUP + first_span + slot) * each + iteration) * KEY_TILE;
            if (first_row >= block.longest) break;
            const int place = ((iteration & (block.stages - 1)) * block.slots + slot) * KEY_TILE;
#pragma unroll 1
            for (int row = threadIdx.x / LANES_OF_ROW; row < KEY_TILE; row += rows_at_once) {
                const bool exists = first_row + row < block.start && column < block.size;
                const size_t source = exists ? static_cast<size_t>(first_row + row) * block.size + column : 0;
                const unsigned target = shared_address(block.rows + (place + row) * block.stride + column);
                copy_async_16(target, block.cached_keys + source, exists);
                copy_async_16(target + block.bytes(block.ring), block.cached_values + source, exists);
            }
        }
    }
    commit_copies();
}

// No rows, so no keys either, in a slot that the block does not have.
template <typename T>
__device__ __forceinline__ Unit unit_of(const Block<T>& block, int first_span, int slot, int tile_of_rows, int iteration,
                                        int each) {
    Unit unit;
    unit.begin = ((block.split * GROUP + first_span + slot) * each + iteration) * KEY_TILE;
    unit.ring_row = ((iteration & (block.stages - 1)) * block.slots + slot) * KEY_TILE;
    unit.first_token = tile_of_rows * block.tile_tokens;
    unit.end_token = min(unit.first_token + block.tile_tokens, block.own_count);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = tile_of_rows * ROWS + threadIdx.x % 32 / 4 + 8 * half;
        unit.token[half] = slot < block.slots ? block.token_of(row) : -1;
        unit.length[half] = unit.token[half] < 0 ? 0 : block.tables->lengths[unit.token[half]];
    }
    return unit;
}

// Products of 16 queries and 16 keys (number `keys` of the tile). A lane gets those of its two rows and keys
// 2 (lane % 4), + 1, then of the keys 8 further.
template <typename T, int STEPS>
__device__ __forceinline__ void compute_scores(float (&score)[2][4], const Block<T>& block, const Unit& unit, int keys,
                                               unsigned queries, unsigned rows) {
    const int lane = threadIdx.x % 32, first = unit.begin + BLOCK * keys;
    const bool shares = unit.shares(block, keys);
#pragma unroll
    for (int i = 0; i < 4; ++i) score[0][i] = score[1][i] = 0.f;
#pragma unroll 1
    for (int t = unit.first_token; t < unit.end_token; ++t) {
        if (first < block.tables->lengths[t]) {
            const unsigned address = rows + block.bytes(unit.key_row(block, t, keys));
            float sum[2][4] = {};
#pragma unroll
            for (int k = 0; k < STEPS; ++k) {
                if (16 * k >= block.size) continue;
                unsigned key[4], query[4];
                load_matrices(query, queries + 32 * k);
                load_matrices(key, address + 32 * k);
                multiply<T>(sum[0], query, key[0], key[2]);
                multiply<T>(sum[1], query, key[1], key[3]);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (shares || unit.token[i / 2] == t) score[0][i] = sum[0][i], score[1][i] = sum[1][i];
        }
        if (shares) break;
    }
    if (!shares || block.masks_all) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = first + 2 * (lane % 4) + i % 2;
            if (key >= unit.length[i / 2]) score[0][i] = no_score();
            if (key + 8 >= unit.length[i / 2]) score[1][i] = no_score();
        }
    }
    if (block.masks_all) {
        unsigned sees[2] = {};
#pragma unroll 1
        for (int t = unit.first_token; t < unit.end_token; ++t) {
            const int key = first + lane % 16;
            const unsigned char* seen = block.mask_of(t);
            const unsigned bits = __ballot_sync(FULL_WARP, key == block.start + block.first_token + t ||
                                                               (key < block.mask_keys && __ldcg(seen + key) != 0));
            if (unit.token[0] == t) sees[0] = bits >> 2 * (lane % 4);
            if (unit.token[1] == t) sees[1] = bits >> 2 * (lane % 4);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((sees[i / 2] >> (i % 2) & 1) == 0) score[0][i] = no_score();
            if ((sees[i / 2] >> (8 + i % 2) & 1) == 0) score[1][i] = no_score();
        }
    }
}

// The largest score of each row among a warp's keys, to the row's place in `maxima`.
__device__ __forceinline__ void write_largest(float* maxima, const float (&score)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = fmaxf(fmaxf(score[0][2 * half], score[0][2 * half + 1]),
                              fmaxf(score[1][2 * half], score[1][2 * half + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
        if (threadIdx.x % 4 == 0) maxima[8 * half] = largest;
    }
}

// Softmax of a lane's two rows so far: largest score (log2), what sums of earlier tiles are multiplied by, and totals as
// tensor cores hold them, each twice.
struct Softmax {
    float maximum[2], correction[2], total[4];
};

// The softmax after a tile whose largest scores are in `maxima` [TEAM, ROWS]; `before`: as the span has it, if it has any.
__device__ __forceinline__ Softmax next_softmax(const float* maxima, const float* before, int distance, bool exists,
                                                float scale) {
    Softmax softmax;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float* of_row = maxima + 8 * half;
        const float largest = fmaxf(fmaxf(of_row[0], of_row[ROWS]), fmaxf(of_row[2 * ROWS], of_row[3 * ROWS]));
        float2 state = make_float2(LOWEST, 0.f);
        if (exists) state = *reinterpret_cast<const float2*>(before + half * distance);
        softmax.maximum[half] = fmaxf(state.x, largest * scale);
        softmax.correction[half] = power_of_two(state.x - softmax.maximum[half]);
        softmax.total[2 * half] = softmax.total[2 * half + 1] = state.y * softmax.correction[half];
    }
    return softmax;
}

// Weights of a lane's scores, as the next product takes them.
template <typename T>
__device__ __forceinline__ uint4 weights_of(const float (&score)[2][4], const Softmax& softmax, float scale) {
    auto pair = [&](int i) {
        const float* two = &score[i / 2][2 * (i % 2)];
        return pack<T>(power_of_two(fmaf(two[0], scale, -softmax.maximum[i % 2])),
                       power_of_two(fmaf(two[1], scale, -softmax.maximum[i % 2])));
    };
    return make_uint4(pair(0), pair(1), pair(2), pair(3));
}

// Adds a tile's weights, and its values so weighted, to a span's rows; a warp has every fourth 16 columns, from `part` on.
template <typename T, int STEPS>
__device__ __forceinline__ void add_values(float* span, Softmax& softmax, const uint4* weights, bool has_sums,
                                           const Block<T>& block, const Unit& unit, int part, unsigned rows) {
    constexpr int COLUMNS = STEPS / TEAM;  // of 16 head elements
    const int lane = threadIdx.x % 32;
    auto column_of = [&](int n) { return 16 * (part + TEAM * (n / 2)) + 8 * (n % 2) + 2 * (lane % 4); };
    float sum[2 * COLUMNS][4];
#pragma unroll
    for (int n = 0; n < 2 * COLUMNS; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float2 before = make_float2(0.f, 0.f);
            if (has_sums && column_of(n) < block.size)
                before = *reinterpret_cast<const float2*>(span + 8 * half * block.stride + column_of(n));
            sum[n][2 * half] = before.x * softmax.correction[half];
            sum[n][2 * half + 1] = before.y * softmax.correction[half];
        }
    }
#pragma unroll
    for (int keys = 0; keys < TEAM; ++keys) {
        const uint4 four = weights[keys * 32];
        const unsigned weight[4] = {four.x, four.y, four.z, four.w};
        multiply<T>(softmax.total, weight, Ones<T>::PAIR, Ones<T>::PAIR);
        const bool shares = unit.shares(block, keys);
#pragma unroll 1
        for (int t = unit.first_token; t < unit.end_token; ++t) {
            if (unit.begin + BLOCK * keys < block.tables->lengths[t]) {
                const int row = unit.key_row(block, t, keys);
                const unsigned address = rows + block.bytes(row + (row < block.ring ? block.ring : block.tokens));
#pragma unroll
                for (int d = 0; d < COLUMNS; ++d) {
                    if (16 * (part + TEAM * d) >= block.size) continue;
                    unsigned value[4];
                    load_transposed_matrices(value, address + 32 * (part + TEAM * d));
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        float next[4];
#pragma unroll
                        for (int i = 0; i < 4; ++i) next[i] = sum[2 * d + n][i];
                        multiply<T>(next, weight, value[2 * n], value[2 * n + 1]);
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            if (shares || unit.token[i / 2] == t) sum[2 * d + n][i] = next[i];
                    }
                }
            }
            if (shares) break;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float* row = span + 8 * half * block.stride;
        if (part == 0 && lane % 4 == 0)
            *reinterpret_cast<float2*>(row + block.padded) = make_float2(softmax.maximum[half], softmax.total[2 * half]);
#pragma unroll
        for (int n = 0; n < 2 * COLUMNS; ++n) {
            if (column_of(n) < block.size)
                *reinterpret_cast<float2*>(row + column_of(n)) = make_float2(sum[n][2 * half], sum[n][2 * half + 1]);
        }
    }
}

// All tiles of a block's spans of `each` tiles; `is_loading`: the first tile of the first slots is under way.
template <typename T, int STEPS>
__device__ __forceinline__ void compute_spans(const Block<T>& block, int each, bool is_loading) {
    const int lane = threadIdx.x % 32, team = block.warp / TEAM, part = block.warp % TEAM, teams = block.warps / TEAM;
    const int slots = block.slots, row_tiles = block.row_tiles, stages = block.stages, stride = block.stride;
    float* behind_spans = block.spans + GROUP * row_tiles * ROWS * stride;
    uint4* weights = reinterpret_cast<uint4*>(behind_spans) + team * TEAM * 32 + lane;
    float* maxima = behind_spans + teams * TEAM * 32 * 4 + team * TEAM * ROWS + lane / 4;
    // Lane i reads row i % 16 of 16, columns of its lower half for i < 16.
    const unsigned rows = shared_address(block.rows) + lane / 16 * 16;
    const unsigned queries = shared_address(block.queries + lane % 16 * stride) + lane / 16 * 16;
#pragma unroll 1
    for (int first_span = 0; first_span < GROUP; first_span += slots) {
        int loaded = is_loading && first_span == 0;  // iterations whose tiles are here or come
#pragma unroll 1
        for (int iteration = 0; iteration < each; ++iteration) {
#pragma unroll 1
            for (; loaded < min(iteration + stages, each); ++loaded)
                load_tiles<T, STEPS>(block, first_span, loaded, each);
            if (loaded > iteration + 1) wait_for_copies<1>();
            else wait_for_copies<0>();
            __syncthreads();
            // Teams keep step. Those with new keys take longer: units of one slot are computed together.
#pragma unroll 1
            for (int first_unit = 0; first_unit < slots * row_tiles; first_unit += teams) {
                const int slot = (first_unit + team) / row_tiles, tile_of_rows = first_unit + team - slot * row_tiles;
                const Unit unit = unit_of(block, first_span, slot, tile_of_rows, iteration, each);
                float* span = block.spans + ((first_span + slot) * row_tiles * ROWS + tile_of_rows * ROWS + lane / 4) * stride;
                const bool computes = unit.begin < __reduce_max_sync(FULL_WARP, max(unit.length[0], unit.length[1]));
                float score[2][4];
                Softmax softmax;
                if (computes) {
                    const unsigned own_queries = queries + block.bytes(tile_of_rows * ROWS);
                    compute_scores<T, STEPS>(score, block, unit, part, own_queries, rows);
                    write_largest(maxima + part * ROWS, score);
                } else if (slot < slots && iteration == 0 && part == 0 && lane % 4 == 0) {
                    *reinterpret_cast<float2*>(span + block.padded) = make_float2(LOWEST, 0.f);
                    *reinterpret_cast<float2*>(span + 8 * stride + block.padded) = make_float2(LOWEST, 0.f);
                }
                __syncthreads();
                if (computes) {
                    softmax = next_softmax(maxima, span + block.padded, 8 * stride, iteration > 0, block.scale);
                    weights[part * 32] = weights_of<T>(score, softmax, block.scale);
                }
                __syncthreads();
                if (computes) add_values<T, STEPS>(span, softmax, weights, iteration > 0, block, unit, part, rows);
            }
            __syncthreads();
        }
    }
}

}  // namespace keys_by_position
}  // namespace decode
