// Packed weights in memory, and how they come into shared memory and become operands of tensor cores.
//
// A block of weights is 8 rows times 128 columns: 16 bytes for each lane of a warp, then scales, and zero points, of the
// rows' groups. Lane i has of row i / 4 columns 8 (i % 4) to + 7 of each of four steps of 32 columns, a word of 4-bit codes a
// step. In a word, column j's code begins at bit 6, 22, 2, 18, 14, 30, 10, 26 (and goes round): two columns at a time stand
// in both halves where one mask leaves them in a 16-bit float's mantissa, of the word as it is or turned by 8.
#pragma once
#include "decode/many_rows.cuh"

namespace decode {
namespace packed {

constexpr int GROUPS = SLICES / SLICES_OF_A_GROUP;
constexpr int BLOCK_STEPS = 4, BLOCK_COLUMNS = 32 * BLOCK_STEPS, CODE_BYTES = 512;

constexpr int ROW_BYTES = 64 * BLOCK_STEPS + 64;  // of activations that stay, a row of a block; against bank conflicts

// What is known of the scales: nothing; that those of float16, of symmetric codes, are finite times 2^18; or that
// each has a zero point behind it.
constexpr int ANY = 0, SMALL = 1, ZEROS = 2;

// A warp's tile: WEIGHT_TILES of 16 weight rows, TOKEN_TILES of 8 rows of activations. WARPS share K: each has a group of
// slices, or a slice. DEPTH blocks of weights find room. Slices end every EVERY steps. SCALES of a row in a block. PAIRED:
// the second 8 rows of 16 are the ups of the first 8. Activations come in a ring of AHEAD steps; of 0:
// they are copied once, for all tiles, and stay.
template <int TOKEN_TILES_, int WEIGHT_TILES_, int WARPS_, int DEPTH_, int EVERY_, int SCALES_, int MODE_, int AHEAD_,
          bool PAIRED>
struct Geometry {
    static constexpr int TOKEN_TILES = TOKEN_TILES_, WEIGHT_TILES = WEIGHT_TILES_, WARPS = WARPS_, THREADS = 32 * WARPS;
    static constexpr int DEPTH = DEPTH_, EVERY = EVERY_, SCALES = SCALES_, MODE = MODE_, SUMS = PAIRED ? 2 : 1;
    static constexpr bool STAYS = AHEAD_ == 0;
    static constexpr int AHEAD = AHEAD_, TILES = 2 * WEIGHT_TILES;  // of 8 rows
    static constexpr int UNIT = 16 * WEIGHT_TILES / SUMS;               // output columns of a tile
    static constexpr int SCALE_BYTES = 2 * SCALES * (MODE == ZEROS ? 2 : 1), PIECES = 8 * SCALE_BYTES / 16;
    static constexpr int BLOCK_BYTES = CODE_BYTES + 8 * SCALE_BYTES, SLOT_BYTES = TILES * BLOCK_BYTES;
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

__device__ __forceinline__ int own_row() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int own_quad() { return threadIdx.x % 4; }

// a b + c of two values each, rounded once.
template <typename T> __device__ __forceinline__ unsigned fused(unsigned a, unsigned b, unsigned c);
template <> __device__ __forceinline__ unsigned fused<__half>(unsigned a, unsigned b, unsigned c) {
    unsigned result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}
template <> __device__ __forceinline__ unsigned fused<__nv_bfloat16>(unsigned a, unsigned b, unsigned c) {
    unsigned result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}
constexpr unsigned MINUS_ZERO = 0x80008000u;  // added to a product it changes no bit

__device__ __forceinline__ unsigned both(unsigned word, int half) {
    unsigned result;
    asm("prmt.b32 %0, %1, %1, %2;" : "=r"(result) : "r"(word), "r"(half == 0 ? 0x1010 : 0x3232));
    return result;
}

// A word turned right by 8, by one instruction: of shifts the compiler makes one for each mask.
__device__ __forceinline__ unsigned turned(unsigned word) {
    unsigned result;
    asm("prmt.b32 %0, %1, %1, 0x0321;" : "=r"(result) : "r"(word));
    return result;
}

// What codes of a row's group become: `values` gives the columns of a word in four pairs, (code - zero point) scale, rounded
// once. Products and differences before that are exact. `mask` is LOW in a register.
template <typename T, int MODE> struct Group;

// Of float16, codes stand at bits 6 to 9, or 2 to 5. Behind an exponent of 1024 that is 1024 + 64 q, or 1024 + 4 q.
constexpr unsigned HIGH = 0x03c003c0u, LOW = 0x003c003cu, THOUSAND = 0x64006400u;
constexpr unsigned SIXTY_FOURTH = 0x24002400u, QUARTER = 0x34003400u;

// Without an exponent, bits 6 to 9 are 2^-18 q. The scale is stored times 2^18.
template <> struct Group<__half, SMALL> {
    unsigned scale, large, middle;
    __device__ __forceinline__ void set(const unsigned* stored, int i) {
        large = both(stored[i / 2], i % 2);
        scale = fused<__half>(large, 0x00400040u, MINUS_ZERO), middle = fused<__half>(large, 0x82008200u, MINUS_ZERO);
    }
    __device__ __forceinline__ void values(unsigned word, unsigned mask, unsigned& high, unsigned& low) const {
        high = fused<__half>(word & HIGH, large, middle);
        low = fused<__half>(fused<__half>(word & mask | THOUSAND, QUARTER, 0xdc20dc20u), scale, MINUS_ZERO);
    }
    __device__ __forceinline__ void values(unsigned word, unsigned mask, unsigned (&four)[4]) const {
        values(word, mask, four[0], four[1]);
        values(turned(word), mask, four[2], four[3]);
    }
};

// Any scale; the zero point is stored as -(16 + z).
template <int MODE> struct Group<__half, MODE> {
    unsigned scale, high_zero, low_zero;
    __device__ __forceinline__ void set(const unsigned* stored, int i) {
        if constexpr (MODE == ZEROS) {
            scale = both(stored[i], 0), high_zero = both(stored[i], 1);
            low_zero = fused<__half>(high_zero, 0x3c003c00u, 0xdb80db80u);  // - 240
        } else {
            scale = both(stored[i / 2], i % 2), high_zero = 0xce00ce00u, low_zero = 0xdc20dc20u;  // - 24, - 264
        }
    }
    __device__ __forceinline__ void values(unsigned word, unsigned mask, unsigned& high, unsigned& low) const {
        high = fused<__half>(fused<__half>(word & HIGH | THOUSAND, SIXTY_FOURTH, high_zero), scale, MINUS_ZERO);
        low = fused<__half>(fused<__half>(word & mask | THOUSAND, QUARTER, low_zero), scale, MINUS_ZERO);
    }
    __device__ __forceinline__ void values(unsigned word, unsigned mask, unsigned (&four)[4]) const {
        values(word, mask, four[0], four[1]);
        values(turned(word), mask, four[2], four[3]);
    }
};

// bfloat16 has room for bits 2 to 5 alone: 128 + 4 q. The zero point is stored as -(32 + z).
template <int MODE> struct Group<__nv_bfloat16, MODE> {
    unsigned scale, zero;
    __device__ __forceinline__ void set(const unsigned* stored, int i) {
        if constexpr (MODE == ZEROS) scale = both(stored[i], 0), zero = both(stored[i], 1);
        else scale = both(stored[i / 2], i % 2), zero = 0xc220c220u;  // - 40
    }
    __device__ __forceinline__ unsigned value(unsigned word, unsigned mask) const {
        using Pair = __nv_bfloat16;
        return fused<Pair>(fused<Pair>(word & mask | 0x43004300u, 0x3e803e80u, zero), scale, MINUS_ZERO);
    }
    __device__ __forceinline__ void values(unsigned word, unsigned mask, unsigned (&four)[4]) const {
        const unsigned other = turned(word);
        four[0] = value(word >> 4, mask), four[1] = value(word, mask);
        four[2] = value(other >> 4, mask), four[3] = value(other, mask);
    }
};

// What a lane has of a block of each of its tiles of 8 rows.
template <typename G> struct Held {
    static constexpr int WORDS = (G::SCALE_BYTES + 3) / 4;
    uint4 codes[G::TILES];
    unsigned scales[G::TILES][WORDS];

    __device__ __forceinline__ void read(unsigned slot) {
#pragma unroll
        for (int i = 0; i < G::TILES; ++i, slot += G::BLOCK_BYTES) {
            codes[i] = read_shared_16(slot + threadIdx.x % 32 * 16);
            const unsigned place = slot + CODE_BYTES + own_row() * G::SCALE_BYTES;
            if constexpr (G::SCALE_BYTES == 16) {
                const uint4 four = read_shared_16(place);
                scales[i][0] = four.x, scales[i][1] = four.y, scales[i][2] = four.z, scales[i][3] = four.w;
            } else if constexpr (G::SCALE_BYTES == 8) {
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(scales[i][0]), "=r"(scales[i][1]) : "r"(place) : "memory");
            } else if constexpr (G::SCALE_BYTES == 4) {
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scales[i][0]) : "r"(place) : "memory");
            } else {
                unsigned short one;
                asm volatile("ld.shared.u16 %0, [%1];" : "=h"(one) : "r"(place) : "memory");
                scales[i][0] = one;
            }
        }
    }
    __device__ __forceinline__ unsigned word(int i, int step) const {
        return step == 0 ? codes[i].x : step == 1 ? codes[i].y : step == 2 ? codes[i].z : codes[i].w;
    }
};

// The weights of a warp's share of K of the block's tiles, as one stream of blocks.
template <typename G> struct Weights {
    const char *weight, *codes[G::TILES], *scales;
    int row_tiles, blocks, first, own, tile, tiles, block;  // `block`: the next one of the warp's own; others: in all
    unsigned ring, slot, scale_place;

    __device__ Weights(const Linear& linear, int tiles, int own, unsigned memory)
        : weight(static_cast<const char*>(linear.weight)), row_tiles((linear.rows + 7) / 8),
          blocks((linear.columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS), first(threadIdx.x / 32 * own), own(own),
          tile(blockIdx.x), tiles(tiles), ring(memory + threadIdx.x / 32 * G::DEPTH * G::SLOT_BYTES), slot(ring) {
        const int lane = threadIdx.x % 32;
        static_assert(G::TILES * G::PIECES <= 32, "a lane copies 16 bytes of scales");
        scale_place = lane / G::PIECES * G::BLOCK_BYTES + CODE_BYTES + lane % G::PIECES * 16;
        start_tile();
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
        scales = begin_of(lane / G::PIECES % G::TILES) + CODE_BYTES + lane % G::PIECES * 16;
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
            copy_async_16(slot + i * G::BLOCK_BYTES + lane * 16, codes[i], exists);
            codes[i] += G::BLOCK_BYTES;
        }
        if (lane < G::TILES * G::PIECES) copy_async_16(slot + scale_place, scales, exists);
        scales += G::BLOCK_BYTES;
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
