// What the kernels of packed_linear.cu and packed_tiles.cu have in common: a warp's tile, how its weights come into its
// ring and to the lanes that multiply them, and the outputs of sums that several warps have parts of.
#pragma once
#include "decode/many_rows.cuh"
#include "decode/packed_blocks.cuh"
#include "shared/tile_sums.cuh"

namespace decode {
namespace packed {

// WEIGHT_TILES of 16 weight rows, TOKEN_TILES of 8 rows of activations. DEPTH blocks of the warp's weights find room. SCALES,
// MODE: of the Format. PAIRED: the second 8 rows of 16 are the ups of the first 8.
template <int TOKEN_TILES_, int WEIGHT_TILES_, int DEPTH_, int SCALES_, int MODE_, bool PAIRED>
struct WarpTile : Format<SCALES_, MODE_> {
    using Own = Format<SCALES_, MODE_>;
    static constexpr int TOKEN_TILES = TOKEN_TILES_, WEIGHT_TILES = WEIGHT_TILES_, DEPTH = DEPTH_;
    static constexpr int SCALES = SCALES_, MODE = MODE_, SUMS = PAIRED ? 2 : 1;
    static constexpr int ROW_TILES = WEIGHT_TILES, COLUMN_TILES = TOKEN_TILES;  // of sums: their rows are weight rows
    static constexpr int TILES = 2 * WEIGHT_TILES, WARP_UNIT = 16 * WEIGHT_TILES / SUMS;  // of 8 rows; output columns
    static constexpr int SLOT_BYTES = TILES * Own::BLOCK_BYTES;
    static constexpr int PIECES = Own::TAIL_BYTES / 16;        // of what follows a tile's codes
    static constexpr int ROUNDS = (TILES * PIECES + 31) / 32;  // in which a warp copies them
    static constexpr int STEP_BYTES = TOKEN_TILES * 512;       // of activations
};

__device__ __forceinline__ int own_warp() { return threadIdx.x / 32; }
// The first of the block's rows of activations, which of IN_PARTS is one of several that share them.
template <typename G> __device__ __forceinline__ int first_token() {
    return G::IN_PARTS ? blockIdx.y * 8 * G::TOKEN_TILES : 0;
}

// What a lane has of a block of each of a warp's tiles of 8 rows.
template <typename G> struct Held {
    Lane<G::SCALES, G::MODE> tiles[G::TILES];

    __device__ __forceinline__ void read(unsigned slot) {
#pragma unroll
        for (int i = 0; i < G::TILES; ++i) tiles[i].read(SharedBlock{slot + i * G::BLOCK_BYTES});
    }
};

// The weights of a warp's share of K of the block's tiles, as one stream of blocks. Place: `const char*`, or unsigned for
// bytes from `weight`, which takes fewer registers.
template <typename G, typename Place> struct Weights {
    const char* weight;
    Place codes[G::TILES], scales[G::ROUNDS];
    int row_tiles, blocks, first, own, tile, tiles, block;  // `block`: the next one of the warp's own; others: in all
    unsigned ring, slot;

    // first_of: gives the first of the warp's `own` blocks.
    template <typename First>
    __device__ Weights(const Linear& linear, int tiles, int own, unsigned memory, const First& first_of)
        : weight(static_cast<const char*>(linear.weight)), row_tiles((linear.rows + 7) / 8),
          blocks((linear.columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS), first(first_of(own)),
          own(own), tile(blockIdx.x), tiles(tiles), ring(memory + threadIdx.x / 32 * G::DEPTH * G::SLOT_BYTES), slot(ring) {
        start_tile();
    }
    // The lane's piece of scales of a round, and where it is behind that of the first tile.
    static __device__ int piece_of(int round) { return round * 32 + threadIdx.x % 32; }
    static __device__ int place_of(int piece) {
        return piece / G::PIECES * G::BLOCK_BYTES + G::TAIL_BEGIN + piece % G::PIECES * 16;
    }
    // The tile of 8 rows that is the i-th of the warp's; of what lies behind the last one the last, which nobody writes.
    __device__ Place begin_of(int i) const {
        const int unit = (tile * G::ROW_WARPS + own_warp() % G::ROW_WARPS) * (G::WARP_UNIT / 8) + i / G::SUMS;
        const int own_tile = min(unit, row_tiles - 1) + i % G::SUMS * row_tiles;
        return of(own_tile, Place());
    }
    __device__ const char* of(int own_tile, const char*) const {
        return weight + (static_cast<size_t>(own_tile) * blocks + first) * G::BLOCK_BYTES;
    }
    __device__ unsigned of(int own_tile, unsigned) const {
        return (static_cast<unsigned>(own_tile) * blocks + first) * G::BLOCK_BYTES;
    }
    __device__ const char* at(const char* place) const { return place; }
    __device__ const char* at(unsigned place) const { return weight + place; }
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
                copy_async_16(slot + i * G::BLOCK_BYTES + piece + lane * 16, at(codes[i]) + piece, exists);
            codes[i] += G::BLOCK_BYTES;
        }
#pragma unroll
        for (int round = 0; round < G::ROUNDS; ++round) {
            if (piece_of(round) < G::TILES * G::PIECES)
                copy_async_16(slot + place_of(piece_of(round)), at(scales[round]), exists);
            scales[round] += G::BLOCK_BYTES;
        }
        slot = following(slot);
        if (++block < own) return;
        tile += gridDim.x;
        if (tile < tiles) start_tile();
        else block = 0;
    }
};

// The outputs of a tile that a thread writes where others have parts of their sums (a warp has not ALL of K), as pairs of
// columns, and what they need beside sums.
template <typename T, typename G, bool ADAPTED, typename Output> struct JoinedOutputs {
    static constexpr int PAIRS = G::UNIT / 2;
    static constexpr int EACH = G::ALL ? 1 : (8 * G::TOKEN_TILES * PAIRS + G::THREADS - 1) / G::THREADS;
    static constexpr bool EARLY = !G::ALL && EACH <= 2;  // registers hold what is read before the products
    const Linear& linear;
    const Output& output;
    float2 before[EACH], biases[EACH][G::SUMS];

    __device__ JoinedOutputs(const Linear& linear, const Output& output) : linear(linear), output(output) {}
    template <typename Action> __device__ __forceinline__ void for_each(int first, const Action& action) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = i * G::THREADS + threadIdx.x, b = at / PAIRS, column = at % PAIRS * 2;
            const bool is_own = !G::IN_PARTS || b < 8 * G::TOKEN_TILES;
            if (is_own && first_token<G>() + b < linear.batch && first + column < linear.rows) action(i, b, column);
        }
    }
    __device__ __forceinline__ void read(int first) {
        const T* bias = static_cast<const T*>(linear.bias);
        for_each(first, [&](int i, int b, int column) {
            const int n = first + column;
            before[i] = output.before_two(first_token<G>() + b, n, linear.rows);
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s)
                if (bias != nullptr) biases[i][s] = read_two(bias + s * linear.rows + n, n, linear.rows);
        });
    }
    // Adds the sums at `area` [K_WARPS, rows of activations, STRIDE]: of slices to those of groups, of groups in order; then
    // what adapters add, at `added`.
    __device__ __forceinline__ void write(const float* area, const float* added, int first) const {
        constexpr int PARTS = G::K_WARPS / GROUPS;
        for_each(first, [&](int i, int b, int column) {
            float2 sums[G::SUMS];
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s) {
                const int place = G::SUMS == 1 ? column : column / 8 * 16 + column % 8 + s * 8;
                const float* own = area + b * G::STRIDE + place;
                sums[s] = make_float2(0.f, 0.f);
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
                    float2 group = make_float2(0.f, 0.f);
#pragma unroll
                    for (int p = 0; p < PARTS; ++p, own += G::PLACES) {
                        const float2 one = *reinterpret_cast<const float2*>(own);
                        group.x += one.x, group.y += one.y;
                    }
                    sums[s].x += group.x, sums[s].y += group.y;
                }
                if constexpr (ADAPTED) {
                    const float2 one = *reinterpret_cast<const float2*>(added + b * G::STRIDE + place);
                    sums[s].x += one.x, sums[s].y += one.y;
                }
                if (linear.bias != nullptr) sums[s].x += biases[i][s].x, sums[s].y += biases[i][s].y;
            }
            output.two(first_token<G>() + b, first + column, linear.rows, sums, before[i]);
        });
    }
};

}  // namespace packed
}  // namespace decode
