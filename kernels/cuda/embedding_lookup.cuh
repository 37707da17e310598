#pragma once
#include "groups.cuh"

template <class T>
__device__ inline void copy_row(T* target, const T* source, size_t elements) {
#pragma unroll 1
    for (size_t i = threadIdx.x; i < elements; i += blockDim.x) target[i] = source == nullptr ? T{} : source[i];
}

// One row of `row_bytes` bytes (an even number), whatever its dtype, by one block; zeros where `source` is null.
__device__ inline void copy_bytes(char* target, const char* source, size_t row_bytes) {
    if (aligned_16(target) && aligned_16(source) && row_bytes % 16 == 0) {
        copy_row(reinterpret_cast<uint4*>(target), reinterpret_cast<const uint4*>(source), row_bytes / 16);
    } else {
        copy_row(reinterpret_cast<short*>(target), reinterpret_cast<const short*>(source), row_bytes / 2);
    }
}

// The row of a token id; zeros for an unknown id.
__device__ inline void look_up(
    const char* table, int token_id, char* target, unsigned vocabulary, size_t row_bytes) {
    bool known = token_id >= 0 && unsigned(token_id) < vocabulary;
    copy_bytes(target, known ? table + size_t(token_id) * row_bytes : nullptr, row_bytes);
}
