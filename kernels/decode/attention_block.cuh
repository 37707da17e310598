// What a block of the attention kernel works on: its arguments, its place in the grid, its keys, its memory.
#pragma once
#include "shared/attention.cuh"
#include "shared/clusters.cuh"

namespace decode {
namespace keys_by_position {

using namespace attending;
using namespace quantized;

constexpr int ROWS = 16;  // of the instruction
constexpr int MAX_TOKENS = HOST_MAX_TOKENS;

// Warps that share a tile of 16 rows: 1 or 4. Each has the scores of its part of the keys, then the weights of all of them and
// the sums of its columns, so no sum has another order.
constexpr int TILE_WARPS = HOST_TILE_WARPS;
// Whether a sequence has one new token, and no mask. Its key and value then stand among those of a tile, by their addresses.
constexpr bool ONE_TOKEN = HOST_ONE_TOKEN;
// Whether a block, which then has one tile at a time, keeps the new keys, a tile's keys and its values one after the other in
// the same memory, for GPUs whose blocks get too little for all of them.
constexpr bool IN_TURN = HOST_IN_TURN;
static_assert(!IN_TURN || MAX_TOKENS <= KEY_TILE, "new keys lie where a tile does");
static_assert(KEY_TILE == HOST_KEY_TILE && ROWS == HOST_ROWS, "the host divides keys and rows so");

// Whether the caches' rows are int8; they stay so in shared memory, and become T in the registers of who multiplies them.
// In a query, then, of each 16 elements those of even columns stand first, as `fragment_of` takes those of a key.
constexpr bool INT8 = HOST_INT8;
template <typename T> using CacheElement = typename Choice<INT8, signed char, T>::Type;

// Parts of a head's columns. A block has the values of one half of a head of 512, so two blocks share a span, and multiplies
// both halves of its keys, each product of a query going on where the first half's ended: these have memory of their own, or
// come in turn.
__device__ constexpr int parts_of(int steps) { return steps > 16 ? 2 : 1; }
constexpr bool APART = HOST_HEAD_SIZE > 256 && !IN_TURN;
// Steps of 16 columns that a warp has sums of at once: of warps that share a tile its part of all, else one chunk after the
// other.
template <int STEPS>
constexpr int CHUNK_STEPS = TILE_WARPS == 1 ? 4 : (STEPS / parts_of(STEPS) + TILE_WARPS - 1) / TILE_WARPS;
template <int STEPS> using Chunk = float[2 * CHUNK_STEPS<STEPS>][4];
static_assert(!APART || !HOST_INT8, "rows of int8 come in turn");
// Whether the next kernel starts once the first tile is multiplied, not at once: it takes room and time from warps that share
// a tile, which are few.
constexpr bool NEXT_LATE = TILE_WARPS > 1;
// Areas of rows in memory, of the ring and of new tokens: of each part of keys that has one, and of values.
constexpr int AREAS = APART ? 3 : IN_TURN ? 1 : 2;

// Whether tokens see the latest `window` of their keys alone, and the caches are rings: position p is in row p % kv_rows, which
// are whole tiles. Positions in a block are then counted from the beginning of the first span that one of its sequence's new
// tokens sees. Spans begin at multiples of 2^window_bits tiles, whatever a token sees of them, and a tile or a span of which
// it sees nothing changes none of its sums: so a token's bits depend on its own position alone.
constexpr bool WINDOW = HOST_WINDOW;

// Whether each query head has a sink, and whether scores are capped.
constexpr bool SINKS = HOST_SINKS, CAP = HOST_CAP;

// Whether neighbours of a head are rotated together, and whether the norms of queries and keys stand behind their rotation,
// which changes no sum of squares: then their weights alone do.
constexpr bool NEIGHBOURS = HOST_NEIGHBOURS, NORMS_BEHIND = HOST_NORMS_BEHIND;

// Whether values are normed, too, without weights.
constexpr bool VALUES_NORMED = HOST_VALUES_NORMED;

// Of a block's tokens. In shared memory.
struct Tables {
    unsigned char nodes[MAX_TOKENS][MAX_TOKENS];  // of each token: the new tokens that it sees
    int lengths[MAX_TOKENS];                      // of each token: its keys
    bool is_last_block;
};
static_assert(sizeof(Tables) == HOST_TABLES_BYTES, "the host counts them as shared memory of a block");

// The kernel's arguments; attention.cu tells what they are.
template <typename T> struct Arguments {
    const float* qkv;
    const T *q_norm, *k_norm, *cos_sin;
    const int* start_index;
    const unsigned char* mask;
    CacheElement<T>*k_cache, *v_cache;
    float *k_scale, *v_scale;  // null unless INT8
    const T* sinks;  // of each query head, null unless SINKS
    T* context;
    float* partial;
    unsigned* counters;
    float epsilon, offset, scale, inverse_size, cap, inverse_cap;
    int group, group_inverse, tile_tokens, tile_inverse, size, rotary, kv_rows, tokens, token_blocks, mask_keys, masks_all;
    int span_bits, states, slot_bits, row_tiles, stages, in_cluster, split_bits;
    int rotary_columns, query_columns, window, window_bits;  // of a row of cos_sin; queries take those so many further on
};
static_assert(sizeof(Arguments<__half>) == HOST_ATTENTION_BYTES, "as the host's structure");

// Floats of a row of scores of new tokens, and of a span's state: largest score (log2), sum of weights, two unused, sums.
__device__ constexpr int score_stride_of(int tokens) { return ((tokens + 15) & ~15) + 4; }
__device__ constexpr int state_stride_of(int size) { return size + 4; }
// Bytes of a row of 16 * steps elements in shared memory: an odd multiple of 16, so that eight rows lie in different banks.
__device__ constexpr int row_bytes(int steps, int element_bytes) { return 16 * (steps * element_bytes | 1); }
// The scales in shared memory: of keys, then of values, of the ring, then those of the new tokens, as many as are multiplied.
__device__ constexpr int new_scales_of(int tokens) { return (tokens + 15) & ~15; }
__device__ constexpr int scales_of(int ring, int tokens) { return INT8 ? 2 * (ring + new_scales_of(tokens)) : 0; }
// Dynamic shared memory of a block, beside the states that it merges, where spans have several tiles.
__device__ constexpr int block_bytes(int slots, int row_tiles, int stages, int tokens, int size) {
    const int ring = slots * stages * KEY_TILE, steps = (size + 15) / 16;
    const int row = row_bytes(steps / parts_of(steps), INT8 ? 1 : 2);
    const int rows = AREAS * (ring + tokens) * row + row_tiles * ROWS * row_bytes(steps, 2);
    const int of_tile = TILE_WARPS == 1 ? ROWS * state_stride_of(size) : ROWS * KEY_TILE;
    const int floats = row_tiles * (ROWS * score_stride_of(tokens) + slots * of_tile);
    return rows + 4 * (floats + scales_of(ring, tokens));
}
static_assert(block_bytes(2, 3, 2, 5, HOST_HEAD_SIZE) == HOST_BLOCK_BYTES, "the host gives a block its shared memory");

// Spans of `1 << tile_bits` tiles, by whose number keys are divided. The first `new_span` have committed rows alone; worker
// w of all blocks' slots computes those from w on in steps of the workers. What follows, up to `spans`, has new keys too:
// one worker computes it, so that one block makes them ready.
struct Division {
    int tile_bits, new_span, spans;
    bool has_new;  // the block has the worker of the new keys
    int rounds;    // the most tiles of a slot of the block
};

// Waits until the warps that share a tile, the first or the second of a block, are here. (0 is the barrier of __syncthreads.)
template <int BARRIER> __device__ __forceinline__ void wait_for_warps() {
    asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(32 * TILE_WARPS) : "memory");
}

template <typename T, int STEPS> struct Block : Arguments<T> {
    using Base = Arguments<T>;
    using Base::context, Base::group, Base::group_inverse, Base::in_cluster, Base::k_cache, Base::kv_rows, Base::mask;
    using Base::mask_keys, Base::masks_all, Base::partial, Base::row_tiles, Base::size, Base::slot_bits, Base::span_bits;
    using Base::split_bits, Base::stages, Base::start_index, Base::states, Base::tile_tokens, Base::token_blocks;
    using Base::k_scale, Base::tokens, Base::v_cache, Base::v_scale, Base::window, Base::window_bits;

    // Its place: a share of the spans, a key-value head, and `own_count` tokens of a sequence from `first_token` on, whose
    // `rows` are counted by token, then by head. A warp has a tile of 16 rows, and a slot of the block's spans; of the warps
    // that share these it is number `member`.
    int warp, warps, slots, slot, row_tile, member, split, kv_head, kv_heads, heads, sequence, first_token, own_count, rows;
    // Rows before `start` are committed. Spans have 2^least to 2^most tiles, as a token's keys are many. `active`: blocks
    // that have spans; 2^owner_bits of them merge spans, each of `own_rows` rows at most, which lie as far apart.
    int start, longest, least, most, active, owner_bits, own_rows;
    int shift, low;  // the position from which on positions are counted, and the first of these in a window: 0 unless WINDOW
    CacheElement<T>*cached_keys, *cached_values;
    float *cached_key_scales, *cached_value_scales;

    // Of a head: what its rows are padded to, their parts, and the distance of queries, and of keys and values, in memory.
    using Element = CacheElement<T>;
    static constexpr int PADDED = 16 * STEPS, QUERY_STRIDE = row_bytes(STEPS, sizeof(T)) / sizeof(T);
    static constexpr int PARTS = parts_of(STEPS), PART_STEPS = STEPS / PARTS, PART = 16 * PART_STEPS;
    static constexpr int STRIDE = row_bytes(PART_STEPS, sizeof(Element)) / sizeof(Element);
    static constexpr int CHUNK_COLUMNS = 16 * CHUNK_STEPS<STEPS>;
    static_assert(PARTS == 1 || PART == CHUNK_COLUMNS * TILE_WARPS, "each warp has columns of a part");

    // Memory, rows of STRIDE elements: of the ring, [stages, slots, KEY_TILE] keys, of each part APART, and as many values; of
    // the new tokens, keys and values likewise. Queries [row_tiles, ROWS]. Floats: scales of all these keys and values, if they have any. Then rows
    // of floats: scores of the new tokens [row_tiles, ROWS]; sums of unfinished spans [warps, ROWS], where spans have several
    // tiles, or what the warps of a tile tell each other, its scores; states of the rows that the block merges [spans,
    // own_rows]. IN_TURN: new keys, a tile's keys and its values have the same memory; behind it are new values.
    Tables* tables;
    int ring;
    Element *keys, *new_keys;
    T* queries;
    float *scales, *new_scores, *own_states, *unfinished;
    float2* tile_scores;
    unsigned number_bits;  // see `pair_of`

    // What does not depend on the length of the sequence. What one token makes known is so to the compiler.
    __device__ __forceinline__ void find_place(char* shared, Tables& own_tables) {
        if constexpr (ONE_TOKEN) tokens = token_blocks = tile_tokens = row_tiles = 1, masks_all = 0;
        warp = __shfl_sync(FULL_WARP, static_cast<int>(threadIdx.x / 32), 0);  // known to be the same for a warp
        warps = blockDim.x / 32, slots = 1 << slot_bits, member = TILE_WARPS == 1 ? 0 : warp % TILE_WARPS;
        slot = warp / TILE_WARPS & (slots - 1), row_tile = ONE_TOKEN ? 0 : warp / TILE_WARPS >> slot_bits;
        split = blockIdx.x / PARTS, kv_head = blockIdx.y, kv_heads = gridDim.y, heads = group * kv_heads;
        sequence = token_blocks == 1 ? blockIdx.z : token_blocks == gridDim.z ? 0 : blockIdx.z / token_blocks;
        const int own_tokens = row_tiles * tile_tokens;
        first_token = (blockIdx.z - sequence * token_blocks) * own_tokens;
        own_count = min(own_tokens, tokens - first_token), rows = own_count * group;
        const size_t row = (static_cast<size_t>(sequence) * kv_heads + kv_head) * kv_rows;
        cached_keys = k_cache + row * size, cached_values = v_cache + row * size;
        cached_key_scales = k_scale + row, cached_value_scales = v_scale + row;

        tables = &own_tables;
        if constexpr (INT8) number_bits = quantized::number_bits(T());
        ring = stages * slots * KEY_TILE;
        keys = reinterpret_cast<Element*>(shared);
        new_keys = keys + (IN_TURN ? 0 : AREAS * ring) * STRIDE;
        queries = reinterpret_cast<T*>(keys + AREAS * (ring + tokens) * STRIDE);
        scales = reinterpret_cast<float*>(queries + row_tiles * ROWS * QUERY_STRIDE);
        new_scores = scales + scales_of(ring, tokens);
        unfinished = new_scores + row_tiles * ROWS * score_stride_of(tokens);
        tile_scores = reinterpret_cast<float2*>(unfinished) + warp / TILE_WARPS * (ROWS * KEY_TILE / 2);
        const bool has_unfinished = WINDOW ? window_bits > 0 : kv_rows > KEY_TILE << span_bits;
        if constexpr (TILE_WARPS > 1) own_states = unfinished + warps / TILE_WARPS * (ROWS * KEY_TILE);
        else own_states = unfinished + (has_unfinished ? warps * ROWS * state_stride_of(size) : 0);
    }

    // Whose values the block has.
    static __device__ __forceinline__ int part() { return PARTS == 1 ? 0 : blockIdx.x % PARTS; }

    // Waits for the warps that share the warp's tile.
    __device__ __forceinline__ void wait_for_tile() const {
        static_assert(TILE_WARPS == 1 || HOST_MAX_WARPS <= 2 * TILE_WARPS, "a block has two shared tiles at most");
        if constexpr (TILE_WARPS == 1) __syncwarp();
        else if (warp < TILE_WARPS) wait_for_warps<1>();
        else wait_for_warps<2>();
    }

    // Reads the sequence's length.
    __device__ __forceinline__ void find_keys() {
        if constexpr (WINDOW) {
            const int position = max(__ldcg(start_index + sequence), 0), first = max(position + 1 - window, 0);
            shift = first & -(KEY_TILE << window_bits);
            low = first - shift, start = position - shift, longest = start + tokens;
            least = most = window_bits;
        } else {
            shift = low = 0;
            start = min(__ldcg(start_index + sequence), kv_rows - tokens), longest = start + tokens;
            most = tile_bits_of(longest, span_bits);
            least = ONE_TOKEN || masks_all ? most : tile_bits_of(start + 1, span_bits);
        }
        active = min(1 << split_bits, (start / KEY_TILE >> least + slot_bits) + 1);
        owner_bits = 31 - __clz(active);
        own_rows = (rows + (1 << owner_bits) - 1) >> owner_bits;
    }

    __device__ __forceinline__ Division division_of(int tile_bits) const {
        Division division{tile_bits, start / KEY_TILE >> tile_bits};
        const int tiles = min(tiles_of(longest), 1 << (span_bits + tile_bits)), worker_bits = split_bits + slot_bits;
        division.spans = (tiles + (1 << tile_bits) - 1) >> tile_bits;
        const int whole = division.new_span >> worker_bits, first = split << slot_bits;
        const int worker = division.new_span - (whole << worker_bits) - first;
        division.has_new = worker >= 0 && worker < slots;
        const bool more = !ONE_TOKEN && division.has_new && division.new_span + 1 < division.spans;
        division.rounds = (whole + (worker >= 0) + more) << tile_bits;
        return division;
    }

    // The tile of a slot in a round; -1: none.
    __device__ __forceinline__ int tile_of(const Division& division, int of_slot, int round) const {
        const int worker_bits = split_bits + slot_bits;
        int span = (round >> division.tile_bits << worker_bits) + (split << slot_bits) + of_slot;
        if (span > division.new_span) {
            if (ONE_TOKEN || span != division.new_span + (1 << worker_bits) || division.new_span + 1 >= division.spans)
                return -1;
            span = division.new_span + 1;
        }
        return (span << division.tile_bits) + (round & ((1 << division.tile_bits) - 1));
    }

    // Of the rows from `keys` on, the first of the ring's values, and of the new ones.
    __device__ __forceinline__ int values_row() const { return (AREAS - 1) * ring; }
    __device__ __forceinline__ int new_values_row() const {
        return IN_TURN ? ring : AREAS * ring + (AREAS - 1) * tokens;
    }

    static __device__ __forceinline__ constexpr int bytes(int row) { return row * STRIDE * sizeof(Element); }

    // The logarithm of the tiles of a span of a token with so many keys.
    __device__ __forceinline__ int bits_of(int length) const {
        return WINDOW ? window_bits : tile_bits_of(length, span_bits);
    }

    // The caches' row of a position; of the first one of a tile, those behind it in the tile follow.
    __device__ __forceinline__ int row_of(int position) const {
        return WINDOW ? static_cast<int>(static_cast<unsigned>(shift + position) % static_cast<unsigned>(kv_rows)) : position;
    }

    // Whether a head has the eight elements number n; all but the last it has at compile time.
    __device__ __forceinline__ bool has_eight(int n) const {
        return n < 2 * STEPS - 1 || (n < 2 * STEPS && size == PADDED);
    }

    // The first of those columns of a part that are chunk number CHUNK of a warp, of warps that share a tile each one's own.
    template <int CHUNK> __device__ __forceinline__ int chunk_begin() const {
        return CHUNK_COLUMNS * (TILE_WARPS == 1 ? CHUNK : member);
    }

    // The token of a row that exists, x / group, and the keys of a token.
    __device__ __forceinline__ int token_of(int row) const { return ONE_TOKEN ? 0 : row * group_inverse >> 16; }
    __device__ __forceinline__ int length_of(int token) const { return ONE_TOKEN ? longest : tables->lengths[token]; }

    // The row, among those of `context` and of `partial`, that a row of the block is.
    __device__ __forceinline__ size_t result_of(int row) const {
        const int token = token_of(row);
        return (sequence * tokens + first_token + token) * heads + kv_head * group + row - token * group;
    }
    // What weighted values of a row are multiplied by, whose largest score and sum of weights are known.
    __device__ __forceinline__ float inverse_of(int row, float maximum, float total) const {
        if constexpr (SINKS) {
            const int head = kv_head * group + row - token_of(row) * group;
            return inverse_with_sink<INT8>(maximum, total, decode::to_float(Base::sinks[head]));
        } else {
            return 1.f / total;
        }
    }
    __device__ __forceinline__ const unsigned char* mask_of(int t) const {
        return mask + static_cast<size_t>(sequence * tokens + first_token + t) * mask_keys;
    }

    // Where the state that a span leaves of a row is merged: by the row's block of a cluster, or through global memory.
    __device__ __forceinline__ float* state_of(int row, int span) const {
        const int distance = state_stride_of(size);
        if (split_bits > 0 && !in_cluster) return partial + (result_of(row) * states + span) * distance;
        const int place = row >> owner_bits, owner = row - (place << owner_bits);
        float* state = own_states + (span * own_rows + place) * distance;
        return owner == split ? state : pointer_in_block(state, owner * PARTS + part());
    }
};

}  // namespace keys_by_position
}  // namespace decode
