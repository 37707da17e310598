// How packed weights and activations come into shared memory, and to the lanes that multiply them.
#pragma once
#include "decode/many_rows.cuh"
#include "decode/packed_blocks.cuh"

namespace decode {
namespace packed {

constexpr int GROUPS = SLICES / SLICES_OF_A_GROUP;
constexpr int ROW_BYTES = 64 * BLOCK_STEPS + 64;  // of activations that stay, a row of a block; against bank conflicts

// A warp's tile: WEIGHT_TILES of 16 weight rows, TOKEN_TILES of 8 rows of activations. WARPS share K: each has a group of
// slices, or a slice. DEPTH blocks of weights find room. Slices end every EVERY steps. SCALES, MODE: of the Format. PAIRED:
// the second 8 rows of 16 are the ups of the first 8. Activations come in a ring of AHEAD steps; of 0:
// they are copied once, for all tiles, and stay.
template <int TOKEN_TILES_, int WEIGHT_TILES_, int WARPS_, int DEPTH_, int EVERY_, int SCALES_, int MODE_, int AHEAD_,
          bool PAIRED>
struct Geometry : Format<SCALES_, MODE_> {
    static constexpr int TOKEN_TILES = TOKEN_TILES_, WEIGHT_TILES = WEIGHT_TILES_, WARPS = WARPS_, THREADS = 32 * WARPS;
    static constexpr int DEPTH = DEPTH_, EVERY = EVERY_, SCALES = SCALES_, MODE = MODE_, SUMS = PAIRED ? 2 : 1;
    static constexpr bool STAYS = AHEAD_ == 0;
    static constexpr int AHEAD = AHEAD_, TILES = 2 * WEIGHT_TILES;  // of 8 rows
    static constexpr int UNIT = 16 * WEIGHT_TILES / SUMS;               // output columns of a tile
    using Own = Format<SCALES_, MODE_>;
    static constexpr int PIECES = Own::TAIL_BYTES / 16, SLOT_BYTES = TILES * Own::BLOCK_BYTES;  // of what follows codes
    static constexpr int ROUNDS = (TILES * PIECES + 31) / 32;                                   // in which a warp copies them
    // Tiles of activations whose products alternate.
    static constexpr int TOGETHER = TOKEN_TILES * WEIGHT_TILES <= 4 ? TOKEN_TILES : WEIGHT_TILES == 1 ? 4 : 2;
    static constexpr int STEP_BYTES = TOKEN_TILES * 512;  // of activations, a warp's
    // Shared memory: the warps' rings of weights, their sums [WARPS, rows of activations, STRIDE], their activations.
    static constexpr int STRIDE = 16 * WEIGHT_TILES + 4, PLACES = 8 * TOKEN_TILES * STRIDE;  // against bank conflicts
    static constexpr int SUMS_BEGIN = WARPS * DEPTH * SLOT_BYTES, INPUT_BEGIN = SUMS_BEGIN + WARPS * PLACES * 4;
    static_assert(WARPS == 4 || (WARPS == SLICES && EVERY == BLOCK_STEPS), "a warp has a group of slices, or one");
    static_assert(STAYS || (DEPTH - 1) * BLOCK_STEPS >= AHEAD - 1, "weights have come when their activations have");

    static __device__ constexpr int shared_bytes(int rows, int steps) {
        return INPUT_BEGIN + (STAYS ? rows * steps / BLOCK_STEPS * ROW_BYTES : WARPS * AHEAD * STEP_BYTES);
    }
};
static_assert(Geometry<2, 1, 4, 3, 1, 2, ZEROS, 8, false>::shared_bytes(0, 0) == HOST_PACKED_BYTES &&
                  Geometry<1, 2, 16, 2, 4, 1, ANY, 0, true>::shared_bytes(3, 64) == HOST_STAYING_BYTES,
              "the host gives blocks their shared memory");

// What a lane has of a block of each of its tiles of 8 rows.
template <typename G> struct Held {
    Lane<G::SCALES, G::MODE> tiles[G::TILES];

    __device__ __forceinline__ void read(unsigned slot) {
#pragma unroll
        for (int i = 0; i < G::TILES; ++i) tiles[i].read(SharedBlock{slot + i * G::BLOCK_BYTES});
    }
};

// The weights of a warp's share of K of the block's tiles, as one stream of blocks.
template <typename G> struct Weights {
    const char *weight, *codes[G::TILES], *scales[G::ROUNDS];
    int row_tiles, blocks, first, own, tile, tiles, block;  // `block`: the next one of the warp's own; others: in all
    unsigned ring, slot;

    __device__ Weights(const Linear& linear, int tiles, int own, unsigned memory)
        : weight(static_cast<const char*>(linear.weight)), row_tiles((linear.rows + 7) / 8),
          blocks((linear.columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS), first(threadIdx.x / 32 * own), own(own),
          tile(blockIdx.x), tiles(tiles), ring(memory + threadIdx.x / 32 * G::DEPTH * G::SLOT_BYTES), slot(ring) {
        start_tile();
    }
    // The lane's piece of scales of a round, and where it is behind that of the first tile.
    static __device__ int piece_of(int round) { return round * 32 + threadIdx.x % 32; }
    static __device__ int place_of(int piece) {
        return piece / G::PIECES * G::BLOCK_BYTES + G::TAIL_BEGIN + piece % G::PIECES * 16;
    }
    // The tile of 8 rows that is the i-th of a tile; of what lies behind the last one the last, which nobody writes.
    __device__ const char* begin_of(int i) const {
        const int unit = G::UNIT / 8, own_tile = min(tile * unit + i / G::SUMS, row_tiles - 1) + i % G::SUMS * row_tiles;
        return weight + (static_cast<size_t>(own_tile) * blocks + first) * G::BLOCK_BYTES;
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
                copy_async_16(slot + i * G::BLOCK_BYTES + piece + lane * 16, codes[i] + piece, exists);
            codes[i] += G::BLOCK_BYTES;
        }
#pragma unroll
        for (int round = 0; round < G::ROUNDS; ++round) {
            if (piece_of(round) < G::TILES * G::PIECES) copy_async_16(slot + place_of(piece_of(round)), scales[round], exists);
            scales[round] += G::BLOCK_BYTES;
        }
        slot = following(slot);
        if (++block < own) return;
        tile += gridDim.x;
        if (tile < tiles) start_tile();
        else block = 0;
    }
};

// The activations of a warp's share of K. Those that stay: [blocks, rows, ROW_BYTES], all lanes read what others copied.
// Others in a ring: each lane reads what it copied itself, [TOKEN_TILES, lanes, 16 bytes] a step. Behind the last column are
// zeros; behind the last row any row, whose products nobody reads.
template <typename T, typename G> struct Activations {
    const T* input;
    int row[G::TOKEN_TILES];  // where it begins
    int columns, begin, steps, step, batch, stride;
    unsigned memory, target;

    __device__ Activations(const TiledLinear& arguments, int first, int steps, unsigned memory)
        : input(static_cast<const T*>(arguments.input)), columns(arguments.linear.columns), begin(first * 32), steps(steps),
          step(0), batch(arguments.linear.batch), stride(arguments.stride), memory(memory) {
        const SelectedRows source{arguments.selected, arguments.tokens};
        if constexpr (G::STAYS) {
            this->memory += threadIdx.x / 32 * (steps / BLOCK_STEPS) * batch * ROW_BYTES;
#pragma unroll 1
            for (int b = 0; b < batch; ++b) {
                const T* own = input + static_cast<size_t>(source(b)) * stride;
#pragma unroll 1
                for (int s = own_row(); s < steps; s += 8) {
                    const int column = begin + s * 32 + own_quad() * 8;
                    const unsigned place = this->memory + (s / BLOCK_STEPS * batch + b) * ROW_BYTES + s % BLOCK_STEPS * 64;
                    copy_async_16(place + own_quad() * 16, own + column, column < columns);
                }
            }
        } else {
            this->memory += threadIdx.x / 32 * G::AHEAD * G::STEP_BYTES + threadIdx.x % 32 * 16;
            target = this->memory;
#pragma unroll
            for (int t = 0; t < G::TOKEN_TILES; ++t)
                row[t] = source(min(t * 8 + own_row(), batch - 1)) * stride + begin + own_quad() * 8;
        }
    }
    // Copies the next step; behind the last one the first, of the next tile.
    __device__ __forceinline__ void copy() {
        const bool exists = begin + own_quad() * 8 + step * 32 < columns;
#pragma unroll
        for (int t = 0; t < G::TOKEN_TILES; ++t)
            copy_async_16(target + t * 512, input + row[t] + step * 32, exists);
        if (++step == steps) step = 0;
        target = target == memory + (G::AHEAD - 1) * G::STEP_BYTES ? memory : target + G::STEP_BYTES;
    }
    __device__ unsigned first_place() const {
        return G::STAYS ? memory + min(own_row(), batch - 1) * ROW_BYTES + own_quad() * 16 : memory;
    }
    // Where the step behind step `d` of a block is, which is at `place`.
    __device__ unsigned following(unsigned place, int d) const {
        if (!G::STAYS) return place == memory + (G::AHEAD - 1) * G::STEP_BYTES ? memory : place + G::STEP_BYTES;
        if (d < BLOCK_STEPS - 1) return place + 64;
        const unsigned next = place + batch * ROW_BYTES - (BLOCK_STEPS - 1) * 64, bytes = steps / BLOCK_STEPS * batch * ROW_BYTES;
        return next >= memory + bytes ? next - bytes : next;
    }
    // The lane's columns of tiles from the first one on.
    __device__ __forceinline__ void read(uint4 (&rows)[G::TOGETHER], unsigned place, int first) const {
        const auto row = [&](int t) { return min(t * 8 + own_row(), batch - 1); };
#pragma unroll
        for (int i = 0; i < G::TOGETHER; ++i) {
            const int t = first + i;
            if (G::STAYS && t > 0) rows[i] = read_shared_16(place + (row(t) - row(0)) * ROW_BYTES);
            else rows[i] = read_shared_16(place + t * 512);
        }
    }
};

}  // namespace packed
}  // namespace decode
