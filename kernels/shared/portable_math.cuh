// Exponential and logarithm, operation for operation as in ../portable_math.py, so that both give the same bits. This
// holds only while the compiler may not fuse multiplications with additions (--fmad=false).
#pragma once

#include "shared/ordered_keys.cuh"

constexpr float LN2_HIGH = 0.693359375f;
constexpr float LN2_LOW = -2.12194440e-4f;

// exp(x) * 2^power, where that is a normal number.
__device__ inline float scaled_exp(float x, int power) {
    float exponent = rintf(x * 1.44269504f);
    x = x - exponent * LN2_HIGH;
    x = x - exponent * LN2_LOW;
    float result = x * (1.0f / 5040.0f);
    result = (result + 1.0f / 720.0f) * x;
    result = (result + 1.0f / 120.0f) * x;
    result = (result + 1.0f / 24.0f) * x;
    result = (result + 1.0f / 6.0f) * x;
    result = (result + 1.0f / 2.0f) * x;
    result = (result + 1.0f) * x;
    result = result + 1.0f;
    return result * __int_as_float((int(exponent) + 127 + power) << 23);
}

// exp(difference) * 2^32, rounded down, for difference <= 0.
__device__ inline unsigned long long fixed_point_exp(float difference) {
    if (!(difference >= -23.0f)) return 0;
    return __float2ull_rz(scaled_exp(difference, 32));
}

// The exponential; of values below -87 and above 88 what it is there, NaN counts as -87.
__device__ inline float portable_exp(float value) { return scaled_exp(fminf(fmaxf(value, -87.0f), 88.0f), 0); }

__device__ inline float portable_sigmoid(float value) { return 1.0f / (1.0f + portable_exp(-value)); }

__device__ inline float portable_silu(float value) { return value / (1.0f + portable_exp(-value)); }

// Unnormalized probability in fixed point: 2^32 at the maximum, infinite or not.
__device__ inline unsigned long long weight_of(float value, float maximum) {
    value = without_nan(value);
    if (value == maximum) return 1ull << 32;
    return fixed_point_exp(value - maximum);
}

// Natural logarithm of a positive finite value; a subnormal one counts as the smallest normal one.
__device__ inline float portable_log(float value) {
    int bits = __float_as_int(fmaxf(value, 1.17549435e-38f));
    int exponent = (bits - 0x3f3504f3) >> 23;
    float f = __int_as_float(bits - (exponent << 23)) - 1.0f;
    float s = f / (f + 2.0f);
    float square = s * s;
    float series = square * (1.0f / 9.0f);
    series = (series + 1.0f / 7.0f) * square;
    series = (series + 1.0f / 5.0f) * square;
    series = (series + 1.0f / 3.0f) * square;
    s = s + s;
    series = series * s + s;
    float scale = float(exponent);
    series = scale * LN2_LOW + series;
    return scale * LN2_HIGH + series;
}

// log(1 + exp(value)) = max(value, 0) + log1p(exp(-|value|)).
__device__ inline float portable_softplus(float value) {
    float small = portable_exp(-fabsf(value));
    float w = 1.0f + small;
    float rounded = w - 1.0f;
    float logarithm = rounded != 0.0f ? portable_log(w) * small / rounded : small;
    return fmaxf(value, 0.0f) + logarithm;
}

// A draw of the standard Gumbel distribution from a random word.
__device__ inline float gumbel(unsigned word) {
    float u = fminf((__uint2float_rn(word) + 0.5f) * 0x1p-32f, 0x1.fffffep-1f);
    float w = 1.0f - u;
    float rounded = 1.0f - w;
    float exponential = rounded != 0.0f ? -portable_log(w) * u / rounded : u;
    return -portable_log(exponential);
}
