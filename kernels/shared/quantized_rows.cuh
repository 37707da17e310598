// KV rows of int8 with a float scale each, as `quantization/rows.py` defines them. Tensor cores multiply the integers.
#pragma once
#include "decode/common.cuh"

namespace quantized {

// Weights, and the totals that weighted sums are divided by, are 2 to this power times what they are with other rows: in
// half precision, weights times scales would be subnormal.
constexpr int WEIGHT_BITS = 7;

// The larger of two absolute values, as bits: above infinity's for NaN.
__device__ __forceinline__ unsigned size_bits(float2 x) {
    return max(__float_as_uint(x.x) & 0x7fffffffu, __float_as_uint(x.y) & 0x7fffffffu);
}

// The scale of a row, of which each of LANES neighbouring lanes knows its largest `size_bits`.
template <int LANES> __device__ __forceinline__ float row_scale(unsigned bits) {
#pragma unroll
    for (int other = LANES / 2; other > 0; other /= 2) bits = max(bits, __shfl_xor_sync(decode::FULL_WARP, bits, other));
    // Divided by 127: with the rest of the first quotient, the second is rounded as IEEE demands (Markstein 1990).
    const float largest = __uint_as_float(bits), first = largest * (1.f / 127.f);
    const float scale = bits < 0x7f800000u ? fmaf(fmaf(-127.f, first, largest), 1.f / 127.f, first) : largest;
    return scale < 1.17549435e-38f ? 0.f : scale;
}

// Four elements of a row, a byte each; zeros where the scale is of no use. Products with 1 / scale, about, decide, but next to
// the middle of two integers. One division serves all four: code is fetched anew for each layer.
__device__ __forceinline__ unsigned row_integers(float4 x, float scale) {
    constexpr float UNITS = 12582912.f;  // 1.5 * 2^23: a sum with it has no fraction, and the integer in its last byte
    const float root = rsqrtf(scale), inverse = root * root, elements[4] = {x.x, x.y, x.z, x.w};
    unsigned bytes[4];
    bool is_sure = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float sum = __fadd_rn(__fmul_rn(elements[i], inverse), UNITS);
        is_sure &= fabsf(fmaf(UNITS - sum, scale, elements[i])) <= 0.499f * scale;
        bytes[i] = __float_as_uint(sum);
    }
    unsigned four = __byte_perm(__byte_perm(bytes[0], bytes[1], 0x40), __byte_perm(bytes[2], bytes[3], 0x40), 0x5410);
    if (is_sure) return four;
    if (!(scale > 0.f && scale < __int_as_float(0x7f800000))) return 0u;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
        const float element = i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
        four = four >> 8 | __float_as_uint(__fdiv_rn(element, scale) + UNITS) << 24;
    }
    return four;
}

// What the bytes of elements are joined with to become numbers of T, in a register: kept as a constant, it would be moved to
// one before each use.
__device__ __forceinline__ unsigned number_bits(__half) { return decode::in_register(0x64806480u); }
__device__ __forceinline__ unsigned number_bits(__nv_bfloat16) { return decode::in_register(0x43004300u); }

// Of four elements those number FIRST and FIRST + 2, as a pair of T: bytes become the last ones of numbers whose distance to
// others they are, since instructions that convert integers take several times as long. `bits`: `number_bits` of T. In
// half precision, the numbers are 1024 + 128 + x and 1152.
template <int FIRST> __device__ __forceinline__ unsigned pair_of(unsigned four, unsigned bits, __half) {
    const unsigned numbers = ((four >> 8 * FIRST) & 0x00ff00ffu) ^ bits;
    unsigned pair;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(numbers), "r"(0x64806480u));
    return pair;
}

// The same for bfloat16: 128 and the seven lower bits of x; 128, or 256 where x is negative.
template <int FIRST> __device__ __forceinline__ unsigned pair_of(unsigned four, unsigned bits, __nv_bfloat16) {
    const unsigned numbers = ((four >> 8 * FIRST) & 0x007f007fu) | bits;
    const unsigned others = ((four >> 8 * FIRST) & 0x00800080u) | bits;
    unsigned pair;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(others), "r"(0xbf80bf80u), "r"(numbers));
    return pair;
}

}  // namespace quantized
