// What codes of packed weights become: pairs of T, operands of tensor cores, with the bits of `PackedWeight.values` rounded to T.
//
// Of a step of 32 columns a lane has eight of a row: a word of codes of 4 bits, or two words of 8 bits, four columns each. Codes
// stand where few instructions leave two columns in the halves of a word as 16-bit floats; code_words.py puts them there. A
// Group, set at each step, makes pairs of columns of the step's words.
#pragma once
#include "decode/common.cuh"

namespace decode {
namespace packed {

// A format is one number, MODE. SCALING: nothing is known of the scales; those of float16, of symmetric int4, are finite
// times 2^18; each has a zero point behind it; or a minimum, which is added. CODES. ROUNDED: the dtype that a product is rounded
// to before it is rounded to T. KIND: scales are of that dtype, and products; or products are of float32, and scales are, too,
// or 8-bit floats behind two factors of the row, or float16, or whole numbers of 8 bits behind a factor of the row, as minima
// are, or exponents.
constexpr int ANY = 0, SMALL = 1, ZEROS = 2, MINIMA = 3;
constexpr int INT4 = 0, INT8 = 1, FP8 = 2, FP4 = 3, INT5 = 4, INT6 = 5, IQ4 = 6;
constexpr int TO_T = 0, TO_HALF = 1, TO_BFLOAT16 = 2;
constexpr int NARROW = 0, WIDE = 1, FACTORED = 2, HALVES = 3, LEVELS = 4, POWERS = 5;
constexpr __device__ int scaling_of(int mode) { return mode % 4; }
constexpr __device__ int codes_of(int mode) { return mode / 4 % 8; }
constexpr __device__ int rounded_of(int mode) { return mode / 32 % 4; }
constexpr __device__ int kind_of(int mode) { return mode / 128; }

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

// Bytes 0 to 3 of `low` and 4 to 7 of `high` as the hexadecimal digits of `chosen` name them, the lowest first.
__device__ __forceinline__ unsigned bytes_of(unsigned low, unsigned high, unsigned chosen) {
    unsigned result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(chosen));
    return result;
}
__device__ __forceinline__ unsigned both(unsigned word, int half) { return bytes_of(word, word, half == 0 ? 0x1010 : 0x3232); }

// A word turned right by 8, by one instruction: of shifts the compiler makes one for each mask.
__device__ __forceinline__ unsigned turned(unsigned word) { return bytes_of(word, word, 0x0321); }

// The scale that a row's `stored` words have for its i-th group, and the zero point, both of 16 bits, twice.
template <int SCALING> __device__ __forceinline__ unsigned scale_of(const unsigned* stored, int i) {
    return SCALING == ZEROS ? both(stored[i], 0) : both(stored[i / 2], i % 2);
}
template <int SCALING> __device__ __forceinline__ unsigned zero_of(const unsigned* stored, int i) {
    return SCALING == ZEROS ? both(stored[i], 1) : 0;
}

// Codes of a step as pairs of float16, less their zero points: exact, times a power of two that the scale makes good.
// `mask` is LOW in a register.
template <int CODES, int SCALING> struct Exact;

// Of float16, codes stand at bits 6 to 9, or 2 to 5. Behind an exponent of 1024 that is 1024 + 64 q, or 1024 + 4 q.
constexpr unsigned HIGH = 0x03c003c0u, LOW = 0x003c003cu, THOUSAND = 0x64006400u;
constexpr unsigned SIXTY_FOURTH = 0x24002400u, QUARTER = 0x34003400u;

// The zero point is stored as -(16 + z); with minima there is none.
template <int SCALING> struct Exact<INT4, SCALING> {
    unsigned high_zero, low_zero;
    __device__ __forceinline__ void set(unsigned zero) {
        high_zero = SCALING == ZEROS ? zero : SCALING == MINIMA ? 0xcc00cc00u : 0xce00ce00u;  // - 16, - 24
        low_zero = SCALING == ZEROS ? fused<__half>(high_zero, 0x3c003c00u, 0xdb80db80u)     // - 240
                                    : SCALING == MINIMA ? 0xdc00dc00u : 0xdc20dc20u;         // - 256, - 264
    }
    __device__ __forceinline__ void pairs(unsigned word, unsigned mask, unsigned& high, unsigned& low) const {
        high = fused<__half>(word & HIGH | THOUSAND, SIXTY_FOURTH, high_zero);
        low = fused<__half>(word & mask | THOUSAND, QUARTER, low_zero);
    }
    __device__ __forceinline__ void pairs(const unsigned* words, unsigned mask, unsigned (&four)[4]) const {
        pairs(words[0], mask, four[0], four[1]);
        pairs(turned(words[0]), mask, four[2], four[3]);
    }
};

// Codes of 5 or 6 bits, as of 4, each behind 1024 + 4 q, where UPPER bits join those of 4. words: these, and the upper bits, two
// columns in the halves of a word, the first columns at the lowest ones.
template <int UPPER, int SCALING> struct ExactWithUpper {
    unsigned minus;
    __device__ __forceinline__ void set(unsigned zero) {
        constexpr unsigned MIDDLE = UPPER == 1 ? 0xdc40dc40u : 0xdc80dc80u;  // - 272, - 288
        minus = SCALING == MINIMA ? 0xdc00dc00u : SCALING == ZEROS ? fused<__half>(zero, 0x3c003c00u, 0xdb80db80u) : MIDDLE;
    }
    template <int PAIR> __device__ __forceinline__ unsigned pair(unsigned word, unsigned upper, unsigned mask) const {
        constexpr unsigned BITS = UPPER == 1 ? 0x00400040u : 0x00c000c0u;
        constexpr int BEFORE = UPPER * PAIR;
        const unsigned own = BEFORE <= 6 ? upper << (6 - BEFORE) : upper >> (BEFORE - 6);
        return fused<__half>(word & mask | THOUSAND | own & BITS, QUARTER, minus);
    }
    __device__ __forceinline__ void pairs(const unsigned* words, unsigned mask, unsigned (&four)[4]) const {
        const unsigned other = turned(words[0]);
        four[0] = pair<0>(words[0] >> 4, words[1], mask), four[1] = pair<1>(words[0], words[1], mask);
        four[2] = pair<2>(other >> 4, words[1], mask), four[3] = pair<3>(other, words[1], mask);
    }
};
template <int SCALING> struct Exact<INT5, SCALING> : ExactWithUpper<1, SCALING> {};
template <int SCALING> struct Exact<INT6, SCALING> : ExactWithUpper<2, SCALING> {};

// Behind an exponent of 1024 a byte is 1024 + q. The zero point is stored as -(1024 + z).
template <int SCALING> struct Exact<INT8, SCALING> {
    unsigned minus;
    __device__ __forceinline__ void set(unsigned zero) {
        minus = SCALING == ZEROS ? zero : SCALING == MINIMA ? 0xe400e400u : 0xe480e480u;  // - 1024, - 1152
    }
    __device__ __forceinline__ void pairs(const unsigned* words, unsigned, unsigned (&four)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            four[i] = fused<__half>(bytes_of(words[i / 2], THOUSAND, i % 2 == 0 ? 0x5250 : 0x5351), 0x3c003c00u, minus);
    }
};

// A sign, four bits of exponent and three of fraction are 2^-8 of the value where float16 has its own last ones, numbers below
// normal ones too.
template <int SCALING> struct Exact<FP8, SCALING> {
    __device__ __forceinline__ void set(unsigned) {}
    __device__ __forceinline__ void pairs(const unsigned* words, unsigned, unsigned (&four)[4]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            four[2 * i] = words[i] & 0xbf80bf80u;
            four[2 * i + 1] = words[i] << 7 & 0x3f803f80u | words[i] << 1 & 0x80008000u;
        }
    }
};

// 2^-14 of the value: two bits of exponent, one of fraction.
template <int SCALING> struct Exact<FP4, SCALING> {
    __device__ __forceinline__ void set(unsigned) {}
    __device__ __forceinline__ void pairs(const unsigned* words, unsigned, unsigned (&four)[4]) const {
        const unsigned two[2] = {words[0], turned(words[0])};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            four[i] = two[i] & 0x8e008e00u;
            four[2 + i] = two[i] >> 3 & 0x0e000e00u | two[i] << 7 & 0x80008000u;
        }
    }
};

// Codes name bytes of a table, 128 more than their values (`IQ4` of packed_weight.py), which become float16 as codes of 8 bits
// do. Of a code's bits the lower three choose among eight bytes, the highest one among two such choices.
template <int SCALING> struct Exact<IQ4, SCALING> {
    static_assert(SCALING == ANY, "without zero points and minima");
    __device__ __forceinline__ void set(unsigned) {}
    __device__ __forceinline__ void pairs(const unsigned* words, unsigned, unsigned (&four)[4]) const {
        const unsigned lower = words[0] & 0x77777777u, highest = words[0] >> 1 & 0x44444444u | 0x32103210u;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned chosen = i == 0 ? lower : lower >> 16;
            const unsigned first = bytes_of(0x3f2d1801u, 0x766a5d4fu, chosen), second = bytes_of(0xa6998d81u, 0xf1d9c5b5u, chosen);
            const unsigned bytes = bytes_of(first, second, i == 0 ? highest : highest >> 16);
            four[2 * i] = fused<__half>(bytes_of(bytes, THOUSAND, 0x5150), 0x3c003c00u, 0xe480e480u);  // - 1152
            four[2 * i + 1] = fused<__half>(bytes_of(bytes, THOUSAND, 0x5352), 0x3c003c00u, 0xe480e480u);
        }
    }
};

// Times scales of T, rounded once.
template <typename T, int CODES, int SCALING> struct Product;

template <int CODES, int SCALING> struct Product<__half, CODES, SCALING> {
    Exact<CODES, SCALING> codes;
    unsigned scale;
    __device__ __forceinline__ void set(const unsigned* stored, int i) {
        scale = scale_of<SCALING>(stored, i);
        codes.set(zero_of<SCALING>(stored, i));
    }
    __device__ __forceinline__ void values(const unsigned* words, unsigned mask, unsigned (&four)[4]) const {
        codes.pairs(words, mask, four);
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = fused<__half>(four[i], scale, MINUS_ZERO);
    }
};

// Without an exponent, bits 6 to 9 are 2^-18 q. The scale is stored times 2^18.
template <> struct Product<__half, INT4, SMALL> {
    unsigned scale, large, middle;
    __device__ __forceinline__ void set(const unsigned* stored, int i) {
        large = both(stored[i / 2], i % 2);
        scale = fused<__half>(large, 0x00400040u, MINUS_ZERO), middle = fused<__half>(large, 0x82008200u, MINUS_ZERO);
    }
    __device__ __forceinline__ void values(unsigned word, unsigned mask, unsigned& high, unsigned& low) const {
        high = fused<__half>(word & HIGH, large, middle);
        low = fused<__half>(fused<__half>(word & mask | THOUSAND, QUARTER, 0xdc20dc20u), scale, MINUS_ZERO);
    }
    __device__ __forceinline__ void values(const unsigned* words, unsigned mask, unsigned (&four)[4]) const {
        values(words[0], mask, four[0], four[1]);
        values(turned(words[0]), mask, four[2], four[3]);
    }
};

// bfloat16 has room for bits 2 to 5 alone: 128 + 4 q. The zero point is stored as -(32 + z).
template <int SCALING> struct Product<__nv_bfloat16, INT4, SCALING> {
    unsigned scale, zero;
    __device__ __forceinline__ void set(const unsigned* stored, int i) {
        scale = scale_of<SCALING>(stored, i);
        zero = SCALING == ZEROS ? zero_of<SCALING>(stored, i) : 0xc220c220u;  // - 40
    }
    __device__ __forceinline__ unsigned value(unsigned word, unsigned mask) const {
        using Pair = __nv_bfloat16;
        return fused<Pair>(fused<Pair>(word & mask | 0x43004300u, 0x3e803e80u, zero), scale, MINUS_ZERO);
    }
    __device__ __forceinline__ void values(const unsigned* words, unsigned mask, unsigned (&four)[4]) const {
        const unsigned other = turned(words[0]);
        four[0] = value(words[0] >> 4, mask), four[1] = value(words[0], mask);
        four[2] = value(other >> 4, mask), four[3] = value(other, mask);
    }
};

// bfloat16 has no room for a byte. In float32 it is 2^15 + q, of which 24 bits take the zero point off exactly, times a scale of
// 8 bits. The zero point is stored as -z.
template <int SCALING> struct Product<__nv_bfloat16, INT8, SCALING> {
    float scale, minus;
    __device__ __forceinline__ void set(const unsigned* stored, int i) {
        const float zero = SCALING == ZEROS ? unpack<__nv_bfloat16>(zero_of<SCALING>(stored, i)).x : -128.f;
        scale = unpack<__nv_bfloat16>(scale_of<SCALING>(stored, i)).x, minus = (zero - 32768.f) * scale;
    }
    __device__ __forceinline__ float value(unsigned word, int byte) const {
        return __fmaf_rn(__uint_as_float(bytes_of(word, 0x47000000u, 0x7404u | byte << 4)), scale, minus);
    }
    __device__ __forceinline__ void values(const unsigned* words, unsigned, unsigned (&four)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            four[i] = pack<__nv_bfloat16>(value(words[i / 2], i % 2), value(words[i / 2], 2 + i % 2));
    }
};

// 2^-120 of the value.
template <int SCALING> struct Product<__nv_bfloat16, FP8, SCALING> {
    unsigned scale;
    __device__ __forceinline__ void set(const unsigned* stored, int i) { scale = scale_of<SCALING>(stored, i); }
    __device__ __forceinline__ void values(const unsigned* words, unsigned, unsigned (&four)[4]) const {
        using Pair = __nv_bfloat16;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned word = words[i / 2], size = i % 2 == 0 ? word >> 3 : word << 4, sign = i % 2 == 0 ? word : word << 1;
            four[i] = fused<Pair>(size & 0x07f007f0u | sign & 0x80008000u, scale, MINUS_ZERO);
        }
    }
};

template <int ROUNDED, typename T> struct Rounding { using Type = T; };
template <typename T> struct Rounding<TO_HALF, T> { using Type = __half; };
template <typename T> struct Rounding<TO_BFLOAT16, T> { using Type = __nv_bfloat16; };

// A pair of T from one of another dtype; of T itself nothing is done.
template <typename From, typename T> struct Converted {
    static __device__ __forceinline__ unsigned pair(unsigned from) {
        const float2 two = unpack<From>(from);
        return pack<T>(two.x, two.y);
    }
};
template <typename T> struct Converted<T, T> {
    static __device__ __forceinline__ unsigned pair(unsigned from) { return from; }
};

// The weights of a row's group: `set` takes the i-th scale of those that a lane has, `values` makes a step's words four pairs
// of columns.
template <typename T, int MODE, bool IS_NARROW = kind_of(MODE) == NARROW> struct Group {
    using Inner = typename Rounding<rounded_of(MODE), T>::Type;
    Product<Inner, codes_of(MODE), scaling_of(MODE)> product;
    __device__ __forceinline__ void set(const unsigned* stored, int i) { product.set(stored, i); }
    __device__ __forceinline__ void values(const unsigned* words, unsigned mask, unsigned (&four)[4]) const {
        product.values(words, mask, four);
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = Converted<Inner, T>::pair(four[i]);
    }
};

// A whole number of 8 bits, the i-th of a word, stored as 128 more: behind an exponent of 2^23 a byte is 2^23 + q.
__device__ __forceinline__ float whole_of(unsigned word, int i) {
    return __uint_as_float(bytes_of(word, 0x4b000000u, 0x7440u | i)) - 8388736.f;
}

// Products of float32. A zero point follows its scale as two of float16, a minimum as its scale is. Of FACTORED scales the
// factors of a row stand before those of the lane's groups: a byte is 2^-8 of its value where float16 has its last bits of
// exponent. Of LEVELS the factors of scales and minima, four scales, four minima: products of float32 are exact.
template <typename T, int MODE> struct Group<T, MODE, false> {
    using Inner = typename Rounding<rounded_of(MODE), T>::Type;
    static constexpr int SCALING = scaling_of(MODE), PARTS = SCALING == ZEROS || SCALING == MINIMA ? 2 : 1, KIND = kind_of(MODE);
    Exact<codes_of(MODE), SCALING> codes;
    float scale, minimum;
    __device__ __forceinline__ void set(const unsigned* stored, int i) {
        if constexpr (KIND == FACTORED) {
            const float value = unpack<__half>(bytes_of(stored[2], 0, 0x4404u | i << 4) >> 1).x;
            scale = __fmaf_rn(value, __uint_as_float(stored[0]), value * __uint_as_float(stored[1]));
        } else if constexpr (KIND == LEVELS) {
            const float2 factors = unpack<__half>(stored[0]);
            scale = whole_of(stored[1], i) * factors.x;
            if (PARTS == 2) minimum = whole_of(stored[PARTS], i) * factors.y;
        } else if constexpr (KIND == HALVES) {
            const float2 two = unpack<__half>(PARTS == 2 ? stored[i] : both(stored[i / 2], i % 2));
            scale = two.x, minimum = two.y;
        } else if constexpr (KIND == POWERS) {
            const unsigned exponent = bytes_of(stored[0], 0, 0x4440u | i);
            scale = __uint_as_float(exponent == 0 ? 0x00400000u : exponent << 23);
        } else {
            scale = __uint_as_float(stored[i * PARTS]);
            if (SCALING == MINIMA) minimum = __uint_as_float(stored[i * PARTS + 1]);
        }
        codes.set(SCALING == ZEROS ? stored[i * PARTS + PARTS - 1] : 0);
    }
    __device__ __forceinline__ float value(float code) const {
        return SCALING == MINIMA ? __fmaf_rn(code, scale, minimum) : code * scale;
    }
    __device__ __forceinline__ void values(const unsigned* words, unsigned mask, unsigned (&four)[4]) const {
        codes.pairs(words, mask, four);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Scales that are exponents have no room for what makes 4-bit floats good.
            const unsigned pair = KIND == POWERS ? fused<__half>(four[i], 0x74007400u, MINUS_ZERO) : four[i];
            const float2 two = unpack<__half>(pair);
            four[i] = Converted<Inner, T>::pair(pack<Inner>(value(two.x), value(two.y)));
        }
    }
};

}  // namespace packed
}  // namespace decode
