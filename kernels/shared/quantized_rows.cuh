// KV rows of int8 with a float scale each, as `quantization/rows.py` defines them. Tensor cores multiply the integers.
#pragma once
#include "decode/common.cuh"

namespace quantized {

// Weights, and the totals that weighted sums are divided by, are 2 to this power times what they are with other rows: in
// half precision, weights times scales would be subnormal.
constexpr float WEIGHT_BITS = 7.f;

// The larger of two absolute values, as bits: above infinity's for NaN.
__device__ __forceinline__ unsigned size_bits(float2 x) {
    return max(__float_as_uint(x.x) & 0x7fffffffu, __float_as_uint(x.y) & 0x7fffffffu);
}

// The scale of a row, of which each of LANES neighbouring lanes knows its largest `size_bits`.
template <int LANES> __device__ __forceinline__ float row_scale(unsigned bits) {
#pragma unroll
    for (int other = LANES / 2; other > 0; other /= 2) bits = max(bits, __shfl_xor_sync(decode::FULL_WARP, bits, other));
    const float scale = __fdiv_rn(__uint_as_float(bits), 127.f);
    return scale < 1.17549435e-38f ? 0.f : scale;
}

// An element of a row; zero where the scale is of no use.
__device__ __forceinline__ int row_integer(float x, float scale) {
    return scale > 0.f && scale < __int_as_float(0x7f800000) ? __float2int_rn(__fdiv_rn(x, scale)) : 0;
}

// Elements LOW and HIGH of four, as a pair of T: bytes become the last ones of numbers whose distance to others they are,
// since instructions that convert integers take several times as long. In half precision these are 1024 + 128 + x and 1152.
template <int LOW, int HIGH> __device__ __forceinline__ unsigned pair_of(unsigned four, __half) {
    const unsigned pair = __byte_perm(four ^ 0x80808080u, 0x64646464u, LOW | HIGH << 8 | 0x4040);
    unsigned result;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(0x64806480u));
    return result;
}

// The same for bfloat16: 128 and the seven lower bits of x; 128, or 256 where x is negative.
template <int LOW, int HIGH> __device__ __forceinline__ unsigned pair_of(unsigned four, __nv_bfloat16) {
    const unsigned pair = __byte_perm(four, 0x43434343u, LOW | HIGH << 8 | 0x4040);
    unsigned result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(result)
        : "r"(pair & 0xff80ff80u), "r"(0xbf80bf80u), "r"(pair & 0xff7fff7fu));
    return result;
}

}  // namespace quantized
