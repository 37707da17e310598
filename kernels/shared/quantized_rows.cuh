// KV rows of int8 with a float scale each, as `quantization/rows.py` defines them. In shared memory they are integers of T,
// values divided by VALUE_UNIT so that weights times scales times it keep to the range of half precision.
#pragma once
#include "decode/common.cuh"

namespace quantized {

constexpr float VALUE_UNIT = 128.f;

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

// Eight elements of a row as T, each times `unit`.
template <typename T> __device__ __forceinline__ uint4 expanded(uint2 eight, float unit) {
    auto number = [&](unsigned four, int i) { return static_cast<float>(static_cast<signed char>(four >> 8 * i)) * unit; };
    auto two = [&](unsigned four, int i) { return decode::pack<T>(number(four, i), number(four, i + 1)); };
    return make_uint4(two(eight.x, 0), two(eight.x, 2), two(eight.y, 0), two(eight.y, 2));
}

}  // namespace quantized
