// What a step reads of one token: rows of tables, the row of a causal mask.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

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

// Four mask bytes from `key` on: 1 up to the last visible key, 0 after it.
__device__ inline unsigned mask_word(long long key, long long last_visible) {
    unsigned word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= (key + i <= last_visible ? 1u : 0u) << (8 * i);
    return word;
}

// One row of the mask, by `threads` threads: single bytes up to a 16-byte boundary and after the last one, 16 at a time
// between.
__device__ inline void write_mask_row(
    unsigned char* row, unsigned keys, long long last_visible, unsigned thread = threadIdx.x,
    unsigned threads = blockDim.x) {
    unsigned head = min(keys, unsigned((16 - (size_t)row % 16) % 16));
    unsigned wide = (keys - head) / 16;
    unsigned tail = head + 16 * wide;
    if (thread < head) row[thread] = thread <= last_visible;
#pragma unroll 1
    for (unsigned i = thread; i < wide; i += threads) {
        long long key = head + 16 * i;
        uint4 value;
        if (key + 15 <= last_visible) {
            value = make_uint4(0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u);
        } else if (key > last_visible) {
            value = make_uint4(0, 0, 0, 0);
        } else {
            value = make_uint4(
                mask_word(key, last_visible), mask_word(key + 4, last_visible), mask_word(key + 8, last_visible),
                mask_word(key + 12, last_visible));
        }
        *reinterpret_cast<uint4*>(row + key) = value;
    }
#pragma unroll 1
    for (unsigned key = tail + thread; key < keys; key += threads) row[key] = key <= last_visible;
}

// A token's row of the rotary table, clamped to it, by `threads` threads.
template <class Compute>
__device__ inline void write_rotary_row(
    const float* rotary_table, long long position, Compute* target, unsigned positions, unsigned rotary_size,
    unsigned thread = threadIdx.x, unsigned threads = blockDim.x) {
    position = min(max(position, 0ll), (long long)positions - 1);
    const float* source = rotary_table + position * rotary_size;
#pragma unroll 1
    for (unsigned i = thread; i < rotary_size; i += threads) target[i] = Compute(source[i]);
}
