// Float values as integers of the same order, so that integer atomics and radix selection can compare them.
#pragma once

__device__ inline float minus_infinity() { return __int_as_float(0xff800000); }

// NaN counts as -inf everywhere.
__device__ inline float without_nan(float value) { return value != value ? minus_infinity() : value; }

// Order-preserving key of a value; -0 equals +0.
__device__ inline unsigned ordered_key(float value) {
    unsigned bits = __float_as_uint(without_nan(value) + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The value of a key.
__device__ inline float key_value(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// A value with its token id, ordered by value, then by lower id. Never 0, so 0 can stand for "none".
__device__ inline unsigned long long value_and_id(float value, unsigned id) {
    return (unsigned long long)ordered_key(value) << 32 | (0xffffffffu - id);
}
