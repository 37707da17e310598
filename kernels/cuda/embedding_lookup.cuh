#pragma once
#include "shared/groups.cuh"

template <class T>
__device__ inline void copy_row(T* target, const T* source, size_t elements, unsigned thread, unsigned threads) {
#pragma unroll 1
    for (size_t i = thread; i < elements; i += threads) target[i] = source == nullptr ? T{} : source[i];
}

// One row of `row_bytes` bytes (an even number), whatever its dtype, by `threads` threads; zeros where `source` is null.
__device__ inline void copy_bytes(
    char* target, const char* source, size_t row_bytes, unsigned thread = threadIdx.x, unsigned threads = blockDim.x) {
    if (aligned_16(target) && aligned_16(source) && row_bytes % 16 == 0) {
        copy_row(reinterpret_cast<uint4*>(target), reinterpret_cast<const uint4*>(source), row_bytes / 16, thread, threads);
    } else {
        copy_row(reinterpret_cast<short*>(target), reinterpret_cast<const short*>(source), row_bytes / 2, thread, threads);
    }
}

// The row of a token id; zeros for an unknown id.
__device__ inline void look_up(
    const char* table, int token_id, char* target, unsigned vocabulary, size_t row_bytes, unsigned thread = threadIdx.x,
    unsigned threads = blockDim.x) {
    bool known = token_id >= 0 && unsigned(token_id) < vocabulary;
    copy_bytes(target, known ? table + size_t(token_id) * row_bytes : nullptr, row_bytes, thread, threads);
}
