// How packed weights and activations come into shared memory, and to the lanes that multiply them.
#pragma once
#include "decode/packed_warps.cuh"

namespace decode {
namespace packed {

constexpr int ROW_BYTES = 64 * BLOCK_STEPS + 64;  // of activations that stay, a row of a block; against bank conflicts

// WARPS share K: each has a group of slices, or a slice. Slices end every EVERY steps. Activations come in a ring of AHEAD
// steps; of 0: they are copied once, for all tiles, and stay. The others: see WarpTile.
template <int TOKEN_TILES, int WEIGHT_TILES, int WARPS_, int DEPTH, int EVERY_, int SCALES, int MODE, int AHEAD_, bool PAIRED>
struct Geometry : WarpTile<TOKEN_TILES, WEIGHT_TILES, DEPTH, SCALES, MODE, PAIRED> {
    using Tile = WarpTile<TOKEN_TILES, WEIGHT_TILES, DEPTH, SCALES, MODE, PAIRED>;
    static constexpr int WARPS = WARPS_, THREADS = 32 * WARPS, EVERY = EVERY_, AHEAD = AHEAD_, UNIT = Tile::WARP_UNIT;
    static constexpr int ROW_WARPS = 1, K_WARPS = WARPS;
    static constexpr bool STAYS = AHEAD == 0, ALL = false, IN_PARTS = false;
    // Tiles of activations whose products alternate.
    static constexpr int TOGETHER = TOKEN_TILES * WEIGHT_TILES <= 4 ? TOKEN_TILES : WEIGHT_TILES == 1 ? 4 : 2;
    // Shared memory: the warps' rings of weights, their sums [WARPS, rows of activations, STRIDE], their activations.
    static constexpr int STRIDE = 16 * WEIGHT_TILES + 4, PLACES = 8 * TOKEN_TILES * STRIDE;  // against bank conflicts
    static constexpr int SUMS_BEGIN = WARPS * DEPTH * Tile::SLOT_BYTES, INPUT_BEGIN = SUMS_BEGIN + WARPS * PLACES * 4;
    static_assert(WARPS == 4 || (WARPS == SLICES && EVERY == BLOCK_STEPS), "a warp has a group of slices, or one");
    static_assert(STAYS || (DEPTH - 1) * BLOCK_STEPS >= AHEAD - 1, "weights have come when their activations have");

    static __device__ constexpr int shared_bytes(int rows, int steps) {
        return INPUT_BEGIN + (STAYS ? rows * steps / BLOCK_STEPS * ROW_BYTES : WARPS * AHEAD * Tile::STEP_BYTES);
    }
};
static_assert(Geometry<2, 1, 4, 3, 1, 2, ZEROS, 8, false>::shared_bytes(0, 0) == HOST_PACKED_BYTES &&
                  Geometry<1, 2, 16, 2, 4, 1, ANY, 0, true>::shared_bytes(3, 64) == HOST_STAYING_BYTES,
              "the host gives blocks their shared memory");

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
