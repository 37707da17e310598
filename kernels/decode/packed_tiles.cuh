// How weights and activations of packed_tiles.cu come into shared memory: weights each warp's own, activations for the
// warps of a team.
#pragma once
#include "decode/many_rows.cuh"
#include "decode/packed_blocks.cuh"

namespace decode {
namespace packed {

constexpr int GROUPS = SLICES / SLICES_OF_A_GROUP;

// A warp's tile: WEIGHT_TILES of 16 weight rows, TOKEN_TILES of 8 rows of activations. ROW_WARPS make a team, K_WARPS
// teams share K. DEPTH blocks of a warp's weights find room. Activations come in a ring of STAGES of CHUNK steps for each
// team; of 0: they are copied once, for all tiles, and stay. STEPS of a slice. SCALES, MODE: of the Format.
// PAIRED: the second 8 rows of 16 are the ups of the first 8.
template <int TOKEN_TILES_, int WEIGHT_TILES_, int ROW_WARPS_, int K_WARPS_, int DEPTH_, int STAGES_, int CHUNK_,
          int STEPS_, int SCALES_, int MODE_, bool PAIRED>
struct TileGeometry : Format<SCALES_, MODE_> {
    using Own = Format<SCALES_, MODE_>;
    static constexpr int TOKEN_TILES = TOKEN_TILES_, WEIGHT_TILES = WEIGHT_TILES_, ROW_WARPS = ROW_WARPS_;
    static constexpr int K_WARPS = K_WARPS_, DEPTH = DEPTH_, STAGES = STAGES_, CHUNK = CHUNK_, STEPS = STEPS_;
    static constexpr int EVERY = STEPS % 4 == 0 ? 4 : STEPS % 2 == 0 ? 2 : 1;  // slices end only behind so many steps
    static constexpr int SCALES = SCALES_, MODE = MODE_, SUMS = PAIRED ? 2 : 1, THREADS = 32 * ROW_WARPS * K_WARPS;
    static constexpr int OWN_BLOCKS = SLICES * STEPS / BLOCK_STEPS / K_WARPS;  // of a team, of each row
    static constexpr bool STAYS = STAGES == 0;
    static constexpr int TILES = 2 * WEIGHT_TILES, WARP_UNIT = 16 * WEIGHT_TILES / SUMS, UNIT = WARP_UNIT * ROW_WARPS;
    static constexpr int SLOT_BYTES = TILES * Own::BLOCK_BYTES;
    static constexpr int PIECES = Own::TAIL_BYTES / 16;       // of what follows a tile's codes
    static constexpr int ROUNDS = (TILES * PIECES + 31) / 32;  // in which a warp copies them
    // Tiles of activations whose products alternate.
    static constexpr int EVEN = TOKEN_TILES % 2 == 0 ? 2 : TOKEN_TILES, MANY = TOKEN_TILES % 4 == 0 ? 4 : EVEN;
    static constexpr int TOGETHER = TOKEN_TILES * WEIGHT_TILES <= 6 ? TOKEN_TILES : WEIGHT_TILES == 1 ? MANY : EVEN;
    static constexpr int STEP_BYTES = TOKEN_TILES * 512, CHUNK_BYTES = CHUNK * STEP_BYTES;  // of activations, a team's
    static constexpr int INPUT_BYTES = STAYS ? OWN_BLOCKS * BLOCK_STEPS * STEP_BYTES : STAGES * CHUNK_BYTES;
    // Where a warp has all of K, its sums over the groups that have ended lie in shared memory if registers have no room.
    static constexpr int FRAGMENTS = WEIGHT_TILES * TOKEN_TILES;  // of sums, four each
    static constexpr bool ALL = K_WARPS == 1, LEAVES_TOTAL = ALL && FRAGMENTS > 8;
    static constexpr int STRIDE = 16 * WEIGHT_TILES * ROW_WARPS + 4;  // against bank conflicts
    static constexpr int PLACES = 8 * TOKEN_TILES * STRIDE;
    // Shared memory: where rows begin, rings of weights, sums [K_WARPS, rows of activations, STRIDE], activations.
    static constexpr int RINGS_BEGIN = 256, AREA_BEGIN = RINGS_BEGIN + THREADS / 32 * DEPTH * SLOT_BYTES;
    static constexpr int AREA_BYTES = ALL ? LEAVES_TOTAL * 16 * FRAGMENTS * THREADS : K_WARPS * PLACES * 4;
    static constexpr int INPUT_BEGIN = AREA_BEGIN + AREA_BYTES, SHARED_BYTES = INPUT_BEGIN + K_WARPS * INPUT_BYTES;
    static_assert(ALL || K_WARPS == GROUPS || (K_WARPS == SLICES && STEPS % BLOCK_STEPS == 0), "all, groups or slices");
    static_assert(STAYS || STAGES >= 3, "one is read, one has come, one is copied");
    static_assert(STAYS || (DEPTH - 1) * BLOCK_STEPS / CHUNK >= STAGES - 2, "weights come before their activations");
    static_assert(BLOCK_STEPS % CHUNK == 0 && TOKEN_TILES <= 8, "chunks in blocks, places of rows");
    static_assert(ROW_WARPS == 1 || K_WARPS <= 4, "each team has a barrier");
};
static_assert(TileGeometry<8, 2, 2, 4, 3, 5, 1, 4, 1, SMALL, false>::SHARED_BYTES == HOST_JOINED_BYTES &&
                  TileGeometry<8, 2, 8, 1, 2, 0, 1, 4, 1, ZEROS, true>::SHARED_BYTES == HOST_ALL_BYTES,
              "the host gives blocks their shared memory");

__device__ __forceinline__ int own_warp() { return threadIdx.x / 32; }
// The first of the block's rows of activations.
template <typename G> __device__ __forceinline__ int first_token() { return blockIdx.y * 8 * G::TOKEN_TILES; }

// Behind which what the warps of a team have copied is seen by all of them.
template <typename G> __device__ __forceinline__ void wait_for_warps() {
    if constexpr (G::ROW_WARPS == 1) __syncwarp();
    else if constexpr (G::K_WARPS == 1) __syncthreads();
    else wait_for_team<32 * G::ROW_WARPS>(own_warp() / G::ROW_WARPS);
}

// What a lane has of a block of each of a warp's tiles of 8 rows.
template <typename G> struct HeldTiles {
    Lane<G::SCALES, G::MODE> tiles[G::TILES];

    __device__ __forceinline__ void read(unsigned slot) {
#pragma unroll
        for (int i = 0; i < G::TILES; ++i) tiles[i].read(SharedBlock{slot + i * G::BLOCK_BYTES});
    }
};

// The weights of a warp, of the block's tiles, as one stream of blocks.
template <typename G> struct TileWeights {
    const char* weight;
    unsigned codes[G::TILES], scales[G::ROUNDS];  // bytes from `weight`
    int row_tiles, blocks, first, tile, tiles, block;  // `block`: the next one of the warp's own; others: in all
    unsigned ring, slot;

    __device__ TileWeights(const Linear& linear, int tiles, int first, unsigned memory)
        : weight(static_cast<const char*>(linear.weight)), row_tiles((linear.rows + 7) / 8),
          blocks((linear.columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS), first(first), tile(blockIdx.x), tiles(tiles),
          ring(memory + own_warp() * G::DEPTH * G::SLOT_BYTES), slot(ring) {
        start_tile();
    }
    // The lane's piece of scales of a round, and where it is behind that of the first tile.
    static __device__ int piece_of(int round) { return round * 32 + threadIdx.x % 32; }
    static __device__ int place_of(int piece) {
        return piece / G::PIECES * G::BLOCK_BYTES + G::TAIL_BEGIN + piece % G::PIECES * 16;
    }
    // The tile of 8 rows that is the i-th of the warp's; of what lies behind the last one the last, which nobody writes.
    __device__ unsigned begin_of(int i) const {
        const int unit = (tile * G::ROW_WARPS + own_warp() % G::ROW_WARPS) * (G::WARP_UNIT / 8) + i / G::SUMS;
        const int own_tile = min(unit, row_tiles - 1) + i % G::SUMS * row_tiles;
        return (static_cast<unsigned>(own_tile) * blocks + first) * G::BLOCK_BYTES;
    }
    __device__ void start_tile() {
        const int lane = threadIdx.x % 32;
        block = 0;
#pragma unroll
        for (int i = 0; i < G::TILES; ++i) codes[i] = begin_of(i) + lane * 16;
#pragma unroll
        for (int round = 0; round < G::ROUNDS; ++round) {
            const int piece = piece_of(round);
            scales[round] = begin_of(piece / G::PIECES % G::TILES) + G::TAIL_BEGIN + piece % G::PIECES * 16;
        }
    }
    __device__ unsigned following(unsigned place) const {
        return place == ring + (G::DEPTH - 1) * G::SLOT_BYTES ? ring : place + G::SLOT_BYTES;
    }
    // Copies the stream's next block; zeros behind its end, and behind the last column.
    __device__ __forceinline__ void copy() {
        const bool exists = tile < tiles && first + block < blocks;
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < G::TILES; ++i) {
#pragma unroll
            for (int piece = 0; piece < G::TAIL_BEGIN; piece += 512)
                copy_async_16(slot + i * G::BLOCK_BYTES + piece + lane * 16, weight + codes[i] + piece, exists);
            codes[i] += G::BLOCK_BYTES;
        }
#pragma unroll
        for (int round = 0; round < G::ROUNDS; ++round) {
            if (piece_of(round) < G::TILES * G::PIECES)
                copy_async_16(slot + place_of(piece_of(round)), weight + scales[round], exists);
            scales[round] += G::BLOCK_BYTES;
        }
        slot = following(slot);
        if (++block < G::OWN_BLOCKS) return;
        tile += gridDim.x;
        if (tile < tiles) start_tile();
        else block = 0;
    }
};

// The activations of a team's part of K, [steps, TOKEN_TILES, lanes, 16 bytes]: of row lane / 4 of a tile eight columns.
// Behind the last column are zeros; behind the last row any row, whose products nobody reads.
template <typename T, typename G> struct TeamActivations {
    static constexpr int CHUNKS = G::OWN_BLOCKS * BLOCK_STEPS / G::CHUNK;  // of a tile
    const T* input;
    const int* begins;  // of rows, in shared memory
    int columns, first, column, chunks;  // `column`: of the next chunk; `chunks`: that are left to copy
    unsigned memory, target;

    __device__ TeamActivations(const TiledLinear& arguments, const int* begins, int first, int tiles, unsigned memory)
        : input(static_cast<const T*>(arguments.input)), begins(begins), columns(arguments.linear.columns),
          first(first + own_quad() * 8), column(this->first), chunks(CHUNKS * (G::STAYS ? 1 : tiles)),
          memory(memory + own_warp() / G::ROW_WARPS * G::INPUT_BYTES + threadIdx.x % 32 * 16), target(this->memory) {}
    // The warp's share of the next chunk; behind the last one nothing, behind a tile's last one the first.
    __device__ __forceinline__ void copy() {
        constexpr int COUNT = G::CHUNK * G::TOKEN_TILES, EACH = (COUNT + G::ROW_WARPS - 1) / G::ROW_WARPS;
        if (chunks == 0) return;
        --chunks;
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            const int i = n * G::ROW_WARPS + own_warp() % G::ROW_WARPS, own = column + i / G::TOKEN_TILES * 32;
            if (COUNT % G::ROW_WARPS != 0 && i >= COUNT) break;
            copy_async_16(target + i * 512, input + begins[i % G::TOKEN_TILES * 8 + own_row()] + own, own < columns);
        }
        column += G::CHUNK * 32;
        if (column >= first + CHUNKS * G::CHUNK * 32) column = first;
        target += G::CHUNK_BYTES;
        if (target == memory + G::INPUT_BYTES) target = memory;
    }
    __device__ unsigned following(unsigned place) const {
        return place + G::STEP_BYTES == memory + G::INPUT_BYTES ? memory : place + G::STEP_BYTES;
    }
};

template <typename G> __device__ __forceinline__ void read_rows(uint4 (&rows)[G::TOGETHER], unsigned place, int first) {
#pragma unroll
    for (int i = 0; i < G::TOGETHER; ++i) rows[i] = read_shared_16(place + (first + i) * 512);
}

}  // namespace packed
}  // namespace decode
