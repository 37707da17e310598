// What a block of the attention kernel works on: its arguments, its place in the grid, its memory.
#pragma once
#include "decode/common.cuh"

namespace decode {
namespace keys_by_position {

constexpr int KEY_TILE = 64, BLOCK = 16;  // keys of a tile, and of a step of the instruction
constexpr int TEAM = KEY_TILE / BLOCK;    // warps that compute a tile together
constexpr int GROUP = 4;                  // spans that are merged by a block
constexpr int MAX_TOKENS = HOST_MAX_TOKENS, MAX_ROW_TILES = HOST_MAX_ROW_TILES, MAX_TEAMS = HOST_MAX_TEAMS;
constexpr int ROWS = 16;
static_assert(TEAM * 32 == HOST_TEAM_THREADS, "the host launches as many");
static_assert(KEY_TILE == HOST_KEY_TILE && GROUP == HOST_GROUP && ROWS == HOST_ROWS, "the host divides keys so");

// 2^exponent; 0 for what lies below normal numbers.
__device__ __forceinline__ float power_of_two(float exponent) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
    return result;
}

// How the keys of a token are divided: into tiles, and those into spans of `each`, at most 2^span_bits.
__device__ __forceinline__ int tiles_of(int length) { return (length + KEY_TILE - 1) / KEY_TILE; }
__device__ __forceinline__ int each_of(int length, int span_bits) {
    return (tiles_of(length) + (1 << span_bits) - 1) >> span_bits;
}
__device__ __forceinline__ int groups_of(int length, int each) {
    return (tiles_of(length) + GROUP * each - 1) / (GROUP * each);
}

// Of a block's tokens, and of the heads that it makes ready. In shared memory.
struct Tables {
    unsigned char nodes[MAX_TOKENS][MAX_TOKENS];  // of each token: the new tokens that it sees
    int lengths[MAX_TOKENS];                      // of each token: its keys,
    int2 divisions[MAX_TOKENS];                   // how many tiles a span of them has, and their groups
    int4 heads[2 * MAX_TOKENS];                   // where they come from and go to
    float factors[2 * MAX_TOKENS];                // of their norms
    bool is_last_block;
};
static_assert(sizeof(Tables) == HOST_TABLES_BYTES, "the host counts them as shared memory of a block");
static_assert(MAX_TOKENS + MAX_ROW_TILES * ROWS <= 2 * MAX_TOKENS, "a block has places for all new keys and its queries");

// The kernel's arguments; attention.cu tells what they are.
template <typename T> struct Arguments {
    const float* qkv;
    const T *q_norm, *k_norm, *cos_sin;
    const int* start_index;
    const unsigned char* mask;
    T *k_cache, *v_cache, *context;
    float* partial;
    unsigned* counters;
    float epsilon, offset, scale;
    int group, group_inverse, tile_tokens, size, rotary, kv_rows, tokens, token_blocks, mask_keys, masks_all, span_bits;
    int states, slots, row_tiles, stages;
};
static_assert(sizeof(Arguments<__half>) == HOST_ATTENTION_BYTES, "as the host's structure");

// Bytes that a team's warps leave each other, weights and maxima, and dynamic shared memory of a block.
constexpr int TEAM_BYTES = TEAM * (32 * 16 + ROWS * 4);
__device__ constexpr int stride_of(int size) { return ((size + 15) & ~15) + 8; }
__device__ constexpr int block_bytes(int slots, int row_tiles, int stages, int teams, int tokens, int size) {
    const int rows = 2 * (slots * stages * KEY_TILE + tokens) + row_tiles * ROWS;
    return (2 * rows + 4 * GROUP * row_tiles * ROWS) * stride_of(size) + teams * TEAM_BYTES;
}
static_assert(block_bytes(2, 3, 2, MAX_TEAMS, 5, 80) == HOST_BLOCK_BYTES, "the host gives a block its shared memory");

template <typename T> struct Block : Arguments<T> {
    using Base = Arguments<T>;
    using Base::context, Base::group, Base::group_inverse, Base::k_cache, Base::kv_rows, Base::mask, Base::mask_keys;
    using Base::masks_all, Base::offset, Base::row_tiles, Base::size, Base::slots, Base::span_bits, Base::stages, Base::start_index;
    using Base::tile_tokens, Base::token_blocks, Base::tokens, Base::v_cache;

    // Its place: a group of spans, a key-value head, and tokens of a sequence from `first_token` on. Tokens without a word
    // are counted from that one.
    int warp, warps, split, kv_head, kv_heads, heads, sequence, first_token, own_count;
    // Rows before `start` are committed. Spans have `least` to `most` tiles, as a token's keys are many.
    int start, longest, least, most, blocks;
    T *cached_keys, *cached_values;

    // Memory, rows of `stride` elements: of the ring, [stages, slots, KEY_TILE] keys and as many values; of the new tokens,
    // keys and values; queries [row_tiles, ROWS]; then [GROUP, row_tiles, ROWS, stride] float of spans; of each team weights,
    // the lanes' fragments [TEAM, 32], and the largest scores of each warp's rows [TEAM, ROWS].
    Tables* tables;
    int padded, stride, ring;
    T *rows, *new_keys, *queries;
    float* spans;

    // What does not depend on the length of the sequence.
    __device__ __forceinline__ void find_place(char* shared, Tables& own_tables) {
        warp = __shfl_sync(FULL_WARP, static_cast<int>(threadIdx.x / 32), 0);  // known to be the same for a warp
        warps = blockDim.x / 32;
        split = blockIdx.x, kv_head = blockIdx.y, kv_heads = gridDim.y, heads = group * kv_heads;
        sequence = token_blocks == 1 ? blockIdx.z : blockIdx.z / token_blocks;
        const int own_tokens = row_tiles * tile_tokens;
        first_token = (blockIdx.z - sequence * token_blocks) * own_tokens;
        own_count = min(own_tokens, tokens - first_token);
        const size_t cache = (static_cast<size_t>(sequence) * kv_heads + kv_head) * kv_rows * size;
        cached_keys = k_cache + cache, cached_values = v_cache + cache;

        tables = &own_tables;
        stride = stride_of(size), padded = stride - 8, ring = stages * slots * KEY_TILE;
        rows = reinterpret_cast<T*>(shared);
        new_keys = rows + 2 * ring * stride;
        queries = new_keys + 2 * tokens * stride;
        spans = reinterpret_cast<float*>(queries + row_tiles * ROWS * stride);
    }

    // Reads the sequence's length. `blocks`: those that have a group of spans.
    __device__ __forceinline__ void find_keys() {
        start = min(__ldcg(start_index + sequence), kv_rows - tokens), longest = start + tokens;
        least = each_of(masks_all ? longest : start + 1, span_bits), most = each_of(longest, span_bits);
        blocks = groups_of(longest, most);
        if (least < most) blocks = max(blocks, (1 << span_bits) / GROUP);
    }

    // A norm's weight with what the model adds to it.
    __device__ __forceinline__ float norm_weight(T weight) const {
        return offset == 0.f ? to_float(weight) : to_float(weight) + offset;
    }

    __device__ __forceinline__ int bytes(int row) const { return row * stride * sizeof(T); }

    // The token of a row; -1: none. And its query head among those of the key-value head.
    __device__ __forceinline__ int token_of(int row) const {
        const int t = row % ROWS * group_inverse >> 16, token = row / ROWS * tile_tokens + t;
        return t < tile_tokens && token < own_count ? token : -1;
    }
    __device__ __forceinline__ int head_of(int row) const {
        return row % ROWS - (row % ROWS * group_inverse >> 16) * group;
    }
    // The head of `context` and of `partial` that a row of token t is.
    __device__ __forceinline__ size_t result_of(int row, int t) const {
        return (sequence * tokens + first_token + t) * heads + kv_head * group + head_of(row);
    }
    __device__ __forceinline__ const unsigned char* mask_of(int t) const {
        return mask + static_cast<size_t>(sequence * tokens + first_token + t) * mask_keys;
    }
};

}  // namespace keys_by_position
}  // namespace decode
