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

// Codes of 4 to 6 bits, of which few instructions leave a step's four pairs of columns in the halves of words, each at one of
// two places of the fraction of a 16-bit float: `place(0)` and, of some pairs, `place(1)` bits from its end, with `behind` in
// front. Of 4 bits there is one word; those of 5 and 6 have bits in the `upper` words, too. code_words.py puts them there.
// `mask` is LOW in a register.
constexpr unsigned HIGH = 0x03c003c0u, LOW = 0x003c003cu, THOUSAND = 0x64006400u;

template <int CODES> struct Placed {
    static constexpr int BITS = 0;
    static constexpr __device__ int place(int) { return 0; }
};
template <> struct Placed<INT4> {
    static constexpr int BITS = 4;
    static constexpr __device__ int place(int which) { return which == 0 ? 6 : 2; }
    static constexpr __device__ int which(int pair) { return pair % 2; }
    static __device__ __forceinline__ void pairs(const unsigned* words, unsigned mask, unsigned behind, unsigned (&four)[4]) {
        const unsigned other = turned(words[0]);
        four[0] = words[0] & HIGH | behind, four[1] = words[0] & mask | behind;
        four[2] = other & HIGH | behind, four[3] = other & mask | behind;
    }
};
template <> struct Placed<INT5> {
    static constexpr int BITS = 5;
    static constexpr __device__ int place(int which) { return which == 0 ? 0 : 5; }
    static constexpr __device__ int which(int pair) { return pair % 2; }
    static __device__ __forceinline__ unsigned upper(const unsigned* words, int step) {
        return step == 0 ? words[0] : step == 1 ? words[0] << 4 : step == 2 ? turned(words[0]) : words[0] >> 4;
    }
    static __device__ __forceinline__ void pairs(const unsigned* words, unsigned, unsigned behind, unsigned (&four)[4]) {
        const unsigned other = words[0] >> 10;
        four[0] = words[0] & 0x001f001fu | behind, four[1] = words[0] & 0x03e003e0u | behind;
        four[2] = other & 0x001f001fu | behind, four[3] = other & 0x00200020u | behind | words[1] & HIGH;
    }
};
template <> struct Placed<INT6> {
    static constexpr int BITS = 6;
    static constexpr __device__ int place(int which) { return which == 0 ? 4 : 0; }
    static constexpr __device__ int which(int pair) { return pair / 3; }
    static __device__ __forceinline__ unsigned upper(const unsigned* words, int step) {
        return step % 2 == 0 ? words[step / 2] : turned(words[step / 2]);
    }
    static __device__ __forceinline__ void pairs(const unsigned* words, unsigned, unsigned behind, unsigned (&four)[4]) {
        four[0] = words[0] & 0x03f003f0u | behind, four[1] = words[0] >> 6 & 0x03f003f0u | behind;
        four[2] = words[1] >> 2 & 0x03f003f0u | behind, four[3] = words[0] & 0x000f000fu | behind | words[1] & 0x00300030u;
    }
};

// 2 to the power of a small number; a whole number below 2048 as float16, twice.
constexpr __device__ float power_of_two(int exponent) {
    float power = 1;
    for (int i = 0; i < exponent; ++i) power *= 2;
    for (int i = exponent; i < 0; ++i) power /= 2;
    return power;
}
constexpr __device__ unsigned twice(int number) {
    const int size = number < 0 ? -number : number;
    int exponent = 0;
    while (size >> exponent > 1) ++exponent;
    return size == 0 ? 0 : ((number < 0 ? 0x8000u : 0) | 15 + exponent << 10 | size - (1 << exponent) << 10 - exponent) * 0x10001u;
}

// Codes of a step as pairs of float16, less their zero points: exact, times a power of two that the scale makes good.
template <int CODES, int SCALING> struct Exact {
    // Behind an exponent of 1024 a code at a place is 1024 + 2^place q. The zero point is stored as -(16 + z); with minima there
    // is none.
    using Own = Placed<CODES>;
    unsigned minus[2];
    __device__ __forceinline__ void set(unsigned zero) {
        constexpr int MIDDLE = SCALING == MINIMA ? 0 : 1 << Own::BITS - 1, FIRST = 1024 >> Own::place(0), SECOND = 1024 >> Own::place(1);
        minus[0] = SCALING != ZEROS ? twice(-FIRST - MIDDLE) : FIRST == 16 ? zero : fused<__half>(zero, twice(1), twice(16 - FIRST));
        minus[1] = SCALING != ZEROS ? twice(-SECOND - MIDDLE) : fused<__half>(zero, twice(1), twice(16 - SECOND));
    }
    __device__ __forceinline__ void pairs(const unsigned* words, unsigned mask, unsigned (&four)[4]) const {
        Own::pairs(words, mask, THOUSAND, four);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            four[i] = fused<__half>(four[i], twice(1) - Own::place(Own::which(i)) * 0x04000400u, minus[Own::which(i)]);
    }
};

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
        low = fused<__half>(fused<__half>(word & mask | THOUSAND, 0x34003400u, 0xdc20dc20u), scale, MINUS_ZERO);  // 1/4, - 264
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
    __device__ __forceinline__ void set(const unsigned* stored, int i, unsigned) { product.set(stored, i); }
    __device__ __forceinline__ void values(const unsigned* words, unsigned mask, unsigned (&four)[4]) const {
        product.values(words, mask, four);
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = Converted<Inner, T>::pair(four[i]);
    }
};

// A factor times a whole number of 8 bits, the i-th of a word, stored as 128 more; times 2^EXPONENT. Behind an exponent of 2^-7,
// which `mask` has, the number is 2^-22 (2^15 + 128 + q). What is taken off is exact, and the product is, as a factor is float16.
template <int EXPONENT> __device__ __forceinline__ float level_of(unsigned word, int i, float factor, unsigned mask) {
    constexpr float MORE = power_of_two(EXPONENT);
    return __fmaf_rn(__uint_as_float(bytes_of(word, mask, 0x4505u | i << 4)), factor * (MORE * power_of_two(22)), factor * (MORE * -32896));
}

// Products of float32. A zero point follows its scale as two of float16, a minimum as its scale is. Of FACTORED scales the
// factors of a row stand before those of the lane's groups: a byte is 2^-8 of its value where float16 has its last bits of
// exponent. Of LEVELS the factors of scales and minima, four scales, four minima: products of float32 are exact.
//
// DIRECT: scales have bits to spare, so that codes need not be exact float16 first. A code at a place of a fraction, without an
// exponent, is 2^(place - 24) q, which the scale makes good, and the middle is taken off as a minimum: both products are exact.
// Zeros of negative scales lose their signs, which no sum shows.
template <typename T, int MODE> struct Group<T, MODE, false> {
    using Inner = typename Rounding<rounded_of(MODE), T>::Type;
    static constexpr int SCALING = scaling_of(MODE), PARTS = SCALING == ZEROS || SCALING == MINIMA ? 2 : 1, KIND = kind_of(MODE);
    using Own = Placed<codes_of(MODE)>;
    static constexpr bool DIRECT = Own::BITS > 0 && SCALING != ZEROS && (KIND == HALVES || KIND == LEVELS);
    Exact<codes_of(MODE), SCALING> codes;
    float scales[2], minimum;  // the second scale is of codes at their second place
    __device__ __forceinline__ void set(const unsigned* stored, int i, unsigned mask) {
        constexpr int EXPONENT = DIRECT ? 24 - Own::place(0) : 0;
        float& scale = scales[0];
        if constexpr (KIND == FACTORED) {
            const float value = unpack<__half>(bytes_of(stored[2], 0, 0x4404u | i << 4) >> 1).x;
            scale = __fmaf_rn(value, __uint_as_float(stored[0]), value * __uint_as_float(stored[1]));
        } else if constexpr (KIND == LEVELS) {
            const float2 factors = unpack<__half>(stored[0]);
            scale = level_of<EXPONENT>(stored[1], i, factors.x, mask);
            if (PARTS == 2) minimum = level_of<0>(stored[PARTS], i, factors.y, mask);
        } else if constexpr (KIND == HALVES) {
            const float2 two = unpack<__half>(PARTS == 2 ? stored[i] : both(stored[i / 2], i % 2));
            scale = two.x * power_of_two(EXPONENT), minimum = two.y;
        } else if constexpr (KIND == POWERS) {
            const unsigned exponent = bytes_of(stored[0], 0, 0x4440u | i);
            scale = __uint_as_float(exponent == 0 ? 0x00400000u : exponent << 23);
        } else {
            scale = __uint_as_float(stored[i * PARTS]);
            if (SCALING == MINIMA) minimum = __uint_as_float(stored[i * PARTS + 1]);
        }
        if constexpr (DIRECT) {
            scales[1] = scale * power_of_two(Own::place(0) - Own::place(1));
            if (SCALING != MINIMA) minimum = scale * -power_of_two(Own::BITS - 1 - EXPONENT);
        } else {
            codes.set(SCALING == ZEROS ? stored[i * PARTS + PARTS - 1] : 0);
        }
    }
    __device__ __forceinline__ float value(float code, int pair) const {
        if constexpr (DIRECT) return __fmaf_rn(code, scales[Own::which(pair)], minimum);
        return SCALING == MINIMA ? __fmaf_rn(code, scales[0], minimum) : code * scales[0];
    }
    __device__ __forceinline__ void values(const unsigned* words, unsigned mask, unsigned (&four)[4]) const {
        if constexpr (DIRECT) Own::pairs(words, mask, 0, four);
        else codes.pairs(words, mask, four);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Scales that are exponents have no room for what makes 4-bit floats good.
            const unsigned pair = KIND == POWERS ? fused<__half>(four[i], 0x74007400u, MINUS_ZERO) : four[i];
            const float2 two = unpack<__half>(pair);
            four[i] = Converted<Inner, T>::pair(pack<Inner>(value(two.x, i), value(two.y, i)));
        }
    }
};

}  // namespace packed
}  // namespace decode
