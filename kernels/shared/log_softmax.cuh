// The normalizer of a log-softmax, operation for operation as in ../log_softmax.py, so that both give the same bits. This
// holds only while the compiler may not fuse multiplications with additions (--fmad=false).
#pragma once

#include "shared/ordered_keys.cuh"
#include "shared/portable_math.cuh"

namespace draft {

constexpr unsigned CHUNK = 4096;  // ids whose exponentials are taken relative to a common maximum

// exp(difference) * 2^32, rounded down, for difference <= 0, by a polynomial for the fraction of the power of two.
__device__ inline unsigned long long softmax_weight(float difference) {
    constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23 leaves the nearest integer in the mantissa's low bits
    constexpr float ONE = 0x1p32f;
    float power = fmaxf(difference, -100.0f) * 1.44269504f;
    float rounded = power + ROUNDING;
    float fraction = power - (rounded - ROUNDING);
    float result = fraction * (0.0013264727f * ONE);
    result = (result + 0.0096715130f * ONE) * fraction;
    result = (result + 0.055507336f * ONE) * fraction;
    result = (result + 0.24022242f * ONE) * fraction;
    result = (result + 0.69314700f * ONE) * fraction;
    result = result + ONE;
    return __float2ull_rz(__uint_as_float(__float_as_uint(result) + (__float_as_uint(rounded) << 23)));
}

// A value's difference to the maximum of its row, infinite or not.
__device__ inline float below_maximum(float value, float maximum) { return value == maximum ? 0.0f : value - maximum; }

// The part of a row's sum that comes from a chunk with this sum and maximum.
__device__ inline unsigned long long scaled_sum(unsigned long long sum, float chunk_maximum, float maximum) {
    unsigned long long scale = softmax_weight(below_maximum(chunk_maximum, maximum));
    return ((sum >> 22) * scale >> 10) + ((sum & 0x3fffff) * scale >> 32);
}

// Logarithm of a sum of weights.
__device__ inline float log_of_sum(unsigned long long sum) { return portable_log(__ull2float_rn(sum) * 0x1p-32f); }

}  // namespace draft
