// What a block of prompt attention works on: its arguments, its queries and their keys, its memory.
#pragma once
#include "prefill/arguments.cuh"
#include "prefill/tiles.cuh"
#include "shared/attention.cuh"

namespace prefill {

using namespace attending;

constexpr bool INT8 = HOST_INT8;  // the caches' rows are
// Whether queries see the latest `window` rows up to their own alone, and the caches are rings of whole tiles: position p is
// in row p % C.
constexpr bool WINDOW = HOST_WINDOW;
// Whether each query sees the rows up to one that is given for it, its own or that of a later one of the same step, as the
// tokens of an image see all of it; they never become fewer from query to query. A window, and spans, go by the query's own
// row.
constexpr bool AHEAD = HOST_AHEAD;
// Whether each query head has a sink.
constexpr bool SINKS = HOST_SINKS, CAP = HOST_CAP;
static_assert(!(SINKS && AHEAD), "no model has both");
#if HOST_AHEAD
using Arguments = AttentionAheadArguments;
#else
using Arguments = CausalAttentionArguments;
#endif

// The last row that a token of a sequence, whose new ones begin at `start`, sees.
template <typename Its>
__device__ __forceinline__ int last_seen(const Its& arguments, int sequence, int token, int start) {
    if constexpr (AHEAD) return arguments.last_seen[static_cast<size_t>(sequence) * arguments.T + token];
    return start + token;
}

// Logarithms: of the most spans without a window, and of the tiles of a span of one.
struct Division {
    int span_bits, window_bits;
};
static_assert(KEY_TILE == HOST_KEY_TILE && sizeof(Division) == HOST_DIVISION_BYTES, "as the host has them");

// Heads are padded to SIZE elements; a warp has TILES times 16 queries, and reads each key for all of them. STAGES tiles of keys
// and values have places in memory; with one, values come while scores are computed, and keys while values are added.
// PASS_TILES and PASS_COLUMNS: the queries and columns of sums that registers hold twice, of a span and of all before, where
// spans have several tiles; keys pass by again for others. Of heads of 512 half a tile's keys or values, a PART of their columns,
// has a place, one after the other. No bit depends on any of these.
template <int SIZE_, int TILES_> struct Shape {
    static constexpr int SIZE = SIZE_, TILES = TILES_, ROWS = 16 * TILES * WARPS, STAGES = SIZE <= 128 ? 2 : 1;
    static constexpr int STEPS = SIZE / 16, CHUNKS = SIZE / 8, BYTES = 2 * SIZE;
    static constexpr int PART = SIZE < 256 ? SIZE : 256, PARTS = SIZE / PART, PLACE = 2 * PART * KEY_TILE;
    static constexpr int RING = PARTS == 1 ? 2 * STAGES * PLACE : PLACE;  // bytes
    static constexpr int PASS_TILES = SIZE == 64 ? TILES : 1, PASS_COLUMNS = SIZE < 128 ? SIZE : 128;
    // Scores of the next tile are computed while weights are made of a tile's, where registers hold both.
    template <bool SPANS> static constexpr bool EARLY = (SIZE == 64 && (TILES == 1 || !SPANS)) || (SIZE == 128 && TILES == 1);
    static constexpr int BLOCKS = SIZE * TILES == 64 ? 3 : 2;  // that registers leave room for
};

// What a block works on: queries of a head of a sequence, from `first_token` on.
template <typename T, typename Its> struct Block {
    const Arguments& arguments;
    const Division division;
    int size, tokens, rows, window, sequence, head, first_token, start;
    int first_tile, tiles, end;  // that its queries see, and where the rows end
    size_t first_row;            // of the caches' rows, that of the sequence's head
    unsigned queries, ring, number_bits;
    const float* scales;
    float cap, inverse_cap;  // see `cap_scores`

    // Of the warp, the first query in the block, its position, where rows end that its queries see, the end of those that the
    // first of them sees, and the first tile.
    int warp_row, position, warp_end, shared_end, warp_tile;
    int least_bits, most_bits, turns;  // of its queries, and the most different ones that a warp has
    bool exists;

    // The last row that a query of the block sees; what stands for queries that do not exist is not written.
    __device__ __forceinline__ int last_of(int row) const {
        return last_seen(arguments, sequence, min(first_token + row, tokens - 1), start);
    }

    // The logarithm of the tiles of a span of a query of the block.
    __device__ __forceinline__ int bits_of(int row) const {
        if constexpr (WINDOW) return division.window_bits;
        return tile_bits_of(start + min(first_token + row, tokens - 1) + 1, division.span_bits);
    }

    __device__ __forceinline__ void find_place(char* memory) {
        const int heads = arguments.E / arguments.D, kv_heads = arguments.G;
        size = arguments.D, tokens = arguments.T, rows = arguments.C, window = arguments.rows.window;
        head = blockIdx.x, sequence = blockIdx.y, first_token = (gridDim.z - 1 - blockIdx.z) * Its::ROWS;
        start = arguments.rows.start[sequence];
        end = last_of(Its::ROWS - 1) + 1;
        if (!WINDOW) end = min(end, rows);
        tiles = tiles_of(end), first_tile = WINDOW ? max(start + first_token + 1 - window, 0) / KEY_TILE : 0;
        first_row = (static_cast<size_t>(sequence) * kv_heads + head / (heads / kv_heads)) * rows;
        queries = shared_address(memory), ring = queries + Its::BYTES * Its::ROWS;
        scales = reinterpret_cast<const float*>(memory + Its::BYTES * Its::ROWS + Its::RING);
        number_bits = quantized::number_bits(T());
        cap = static_cast<float>(arguments.cap), inverse_cap = static_cast<float>(arguments.scale / arguments.cap);

        warp_row = threadIdx.x / 32 * 16 * Its::TILES, position = start + first_token + warp_row;
        exists = first_token + warp_row < tokens;
        least_bits = bits_of(warp_row), most_bits = bits_of(warp_row + 16 * Its::TILES - 1), turns = 1;
        for (int warp = 0; warp < WARPS; ++warp) {
            const int its_row = warp * 16 * Its::TILES;
            turns = max(turns, 1 + bits_of(its_row + 16 * Its::TILES - 1) - bits_of(its_row));
        }
        warp_end = min(last_of(warp_row + 16 * Its::TILES - 1) + 1, end), shared_end = last_of(warp_row) + 1;
        const bool is_early = Its::template EARLY<false> || Its::template EARLY<true>;
        warp_tile = is_early || !WINDOW ? first_tile : max(position + 1 - window, 0) / KEY_TILE;
    }

    // Where keys, and behind them values, of a tile lie.
    __device__ __forceinline__ unsigned place_of(int tile) const { return ring + tile % Its::STAGES * (2 * Its::PLACE); }
    __device__ __forceinline__ unsigned values_of(int tile) const { return place_of(tile) + (Its::PARTS == 1 ? Its::PLACE : 0); }

    // Begins to copy a tile's keys (0) or values (1), or a part of their columns.
    template <int KIND> __device__ __forceinline__ void load_tile(int tile, int part = 0) const {
        const unsigned target = KIND == 0 ? place_of(tile) : values_of(tile);
        const unsigned begin = static_cast<unsigned>(tile) * KEY_TILE;
        const size_t row = first_row + (WINDOW ? begin % static_cast<unsigned>(rows) : begin);
        const int exist = end - tile * KEY_TILE, seen = WINDOW ? start + first_token + 1 - window - tile * KEY_TILE : 0;
        const char* const cache = KIND == 0 ? arguments.rows.k_cache : arguments.rows.v_cache;
        if constexpr (INT8) {
            load_integers<Its::PART, KEY_TILE>(target, cache + row * size + Its::PART * part, exist, size, seen);
            const float* own = KIND == 0 ? arguments.row_scales.key : arguments.row_scales.value;
            const int key = threadIdx.x;
            const bool is_there = key < exist && key >= seen;
            if (key < KEY_TILE)
                decode::copy_async_4(shared_address(scales_of<KIND>(tile) + key), own + row + (is_there ? key : 0), is_there);
        } else {
            const T* const own = reinterpret_cast<const T*>(cache) + row * size + Its::PART * part;
            load_rows<T, Its::PART, KEY_TILE>(target, own, size, exist, size, seen);
        }
    }

    template <int KIND> __device__ __forceinline__ const float* scales_of(int tile) const {
        return scales + (tile % Its::STAGES * 2 + KIND) * KEY_TILE;
    }

    // Of a lane's two keys of eight number `n`.
    template <int KIND> __device__ __forceinline__ float2 two_scales(int tile, int n) const {
        return *reinterpret_cast<const float2*>(scales_of<KIND>(tile) + 8 * n + 2 * (threadIdx.x % 4));
    }

    template <int KIND> __device__ __forceinline__ void expand_tile(int tile) const {
        if constexpr (INT8) expand_rows<T, Its::PART, KEY_TILE>(KIND == 0 ? place_of(tile) : values_of(tile), number_bits);
    }
};

}  // namespace prefill
