#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

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

// Rotary row and mask row of one token. Grid (tokens, sequences, ...).
template <class Compute>
__device__ inline void prepare_token(
    const int* kvcache_start_index, const int* position_offsets, const float* rotary_table, Compute* rope_rotary_cos_sin,
    unsigned char* attention_mask, unsigned positions, unsigned rotary_size, unsigned keys) {
    size_t token = (size_t)blockIdx.y * gridDim.x + blockIdx.x;
    long long row = (long long)kvcache_start_index[blockIdx.y] + blockIdx.x;
    long long position = min(max(row + position_offsets[blockIdx.y], 0ll), (long long)positions - 1);
    const float* source = rotary_table + position * rotary_size;
    Compute* target = rope_rotary_cos_sin + token * rotary_size;
    for (unsigned i = threadIdx.x; i < rotary_size; i += blockDim.x) target[i] = Compute(source[i]);
    write_mask_row(attention_mask + token * keys, keys, row);
}
