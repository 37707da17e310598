// Blocks of packed weights, and what a lane of a warp has of them.
//
// A block of weights is 8 rows times 128 columns: 16 bytes for each lane of a warp, of 8-bit codes 16 for columns 0 to 63 and 16
// for the others; of codes of 5 or 6 bits the upper ones, 4 or 8 bytes for each lane; then scales, and zero points or minima, of
// the rows' groups. Lane i has of row i / 4 columns 8 (i % 4) to + 7 of each of four steps of 32 columns. device_layout.py puts
// them there. To have the weights of a block: a Lane reads its share; a Group makes values of it (packed_codes.cuh).
#pragma once
#include "decode/packed_codes.cuh"

namespace decode {
namespace packed {

constexpr int BLOCK_STEPS = 4, BLOCK_COLUMNS = 32 * BLOCK_STEPS;

// SCALES of a row in a block. Those of groups of 16 columns stand in the order of columns 0 to 15 of each step, then 16 to 31: a
// lane needs half of them. PARTS: what each consists of.
template <int SCALES, int MODE> struct Format {
    static constexpr int SCALING = scaling_of(MODE), CODES = codes_of(MODE), KIND = kind_of(MODE);
    static constexpr int WORDS = CODES == INT8 || CODES == FP8 ? 2 : 1;       // of a lane, a step
    static constexpr int UPPER = CODES == INT5 ? 1 : CODES == INT6 ? 2 : 0;  // bits of a code, words of a lane
    static constexpr int PARTS = SCALING == ZEROS || SCALING == MINIMA ? 2 : 1;
    static constexpr int TAIL_BEGIN = 512 * WORDS, CODE_BYTES = TAIL_BEGIN + 128 * UPPER;
    static constexpr int SCALE_BYTES =  // of a row
        KIND == FACTORED ? 8 + SCALES
        : KIND == LEVELS ? (2 + SCALES) * PARTS
        : KIND == POWERS ? SCALES
                         : (KIND == WIDE ? 4 : 2) * SCALES * PARTS;
    static constexpr int LANE_SCALES = SCALES == 8 ? 4 : SCALES;
    static constexpr int LANE_BYTES =
        KIND == FACTORED ? SCALE_BYTES : KIND == LEVELS ? 4 + 4 * PARTS : SCALE_BYTES / SCALES * LANE_SCALES;
    static constexpr int BLOCK_BYTES = CODE_BYTES + 8 * SCALE_BYTES, TAIL_BYTES = BLOCK_BYTES - TAIL_BEGIN;
    static_assert(KIND != FACTORED || (SCALES == 8 && SCALING == ANY), "such are 4-bit floats in groups of 16");
    static_assert(KIND < LEVELS || SCALES == 8 || SCALES == 4, "such have groups of 16 or 32");
    static_assert(SCALING != MINIMA || KIND == WIDE || KIND >= HALVES, "minima are added in float32");
};

// A lane's place in a block.
__device__ __forceinline__ int own_row() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int own_quad() { return threadIdx.x % 4; }

// What a lane has of a block.
template <int SCALES, int MODE> struct Lane {
    using Own = Format<SCALES, MODE>;
    uint4 codes[Own::WORDS];
    unsigned upper[Own::UPPER > 0 ? Own::UPPER : 1];
    unsigned scales[(Own::LANE_BYTES + 3) / 4];

    // `block` reads 16, 8, 4 or 2 bytes at a place behind the block's begin. `row`: of the block.
    template <typename Block> __device__ __forceinline__ void read(const Block& block, int row = own_row()) {
        const int lane = row * 4 + own_quad(), half = SCALES == 8 ? own_quad() / 2 : 0;
#pragma unroll
        for (int piece = 0; piece < Own::WORDS; ++piece) block.read(piece * 512 + lane * 16, codes[piece]);
        if constexpr (Own::UPPER == 1) {
            block.read(Own::TAIL_BEGIN + lane * 4, upper[0]);
        } else if constexpr (Own::UPPER == 2) {
            uint2 two;
            block.read(Own::TAIL_BEGIN + lane * 8, two);
            upper[0] = two.x, upper[1] = two.y;
        }
        const int place = Own::CODE_BYTES + row * Own::SCALE_BYTES + (Own::KIND == FACTORED ? 0 : half * Own::LANE_BYTES);
        if constexpr (Own::KIND == LEVELS) {
            const int numbers = Own::CODE_BYTES + 16 * Own::PARTS + (row * SCALES + half * 4) * Own::PARTS;
            if constexpr (Own::PARTS == 2) {
                uint2 two;
                block.read(Own::CODE_BYTES + row * 4, scales[0]);
                block.read(numbers, two);
                scales[1] = two.x, scales[2] = two.y;
            } else {
                unsigned short factor;
                block.read(Own::CODE_BYTES + row * 2, factor);
                block.read(numbers, scales[1]);
                scales[0] = factor;
            }
        } else if constexpr (Own::LANE_BYTES % 16 == 0) {
#pragma unroll
            for (int word = 0; word < Own::LANE_BYTES / 4; word += 4) {
                uint4 four;
                block.read(place + word * 4, four);
                scales[word] = four.x, scales[word + 1] = four.y, scales[word + 2] = four.z, scales[word + 3] = four.w;
            }
            if (Own::KIND == FACTORED && own_quad() >= 2) scales[2] = scales[3];
        } else if constexpr (Own::LANE_BYTES == 8) {
            uint2 two;
            block.read(place, two);
            scales[0] = two.x, scales[1] = two.y;
        } else if constexpr (Own::LANE_BYTES == 4) {
            block.read(place, scales[0]);
        } else {
            unsigned short one;
            block.read(place, one);
            scales[0] = one;
        }
    }
    // Before a step's first values: its group, where it begins one.
    template <typename T> __device__ __forceinline__ void begin(Group<T, MODE>& group, int step, unsigned mask) const {
        if (step * Own::LANE_SCALES % BLOCK_STEPS == 0) group.set(scales, step * Own::LANE_SCALES / BLOCK_STEPS, mask);
    }
    // The step's eight columns as four pairs of T.
    template <typename T>
    __device__ __forceinline__ void values(const Group<T, MODE>& group, int step, unsigned mask, unsigned (&four)[4]) const {
        const uint4& piece = codes[Own::WORDS == 1 ? 0 : step / 2];
        const bool later = Own::WORDS == 1 ? step >= 2 : step % 2 != 0;
        const unsigned pair[2] = {later ? piece.z : piece.x, later ? piece.w : piece.y};
        if constexpr (Own::UPPER > 0) {
            const unsigned with_upper[2] = {pair[step % 2], Placed<Own::CODES>::upper(upper, step)};
            group.values(with_upper, mask, four);
        } else {
            group.values(Own::WORDS == 1 ? pair + step % 2 : pair, mask, four);
        }
    }
};

// A block in shared memory, and one in global memory that is read once.
struct SharedBlock {
    unsigned begin;
    __device__ __forceinline__ void read(int place, uint4& bytes) const { bytes = read_shared_16(begin + place); }
    __device__ __forceinline__ void read(int place, uint2& bytes) const {
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(bytes.x), "=r"(bytes.y) : "r"(begin + place) : "memory");
    }
    __device__ __forceinline__ void read(int place, unsigned& bytes) const {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bytes) : "r"(begin + place) : "memory");
    }
    __device__ __forceinline__ void read(int place, unsigned short& bytes) const {
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bytes) : "r"(begin + place) : "memory");
    }
};
struct GlobalBlock {
    const char* begin;
    template <typename Bytes> __device__ __forceinline__ void read(int place, Bytes& bytes) const {
        bytes = __ldcs(reinterpret_cast<const Bytes*>(begin + place));
    }
};

}  // namespace packed
}  // namespace decode
