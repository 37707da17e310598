// What the kernels of the draft tree share: numbering of candidates, rows of one token.
#pragma once

#include "cuda/embedding_lookup.cuh"
#include "shared/ordered_keys.cuh"
#include "cuda/prepare_attention.cuh"

namespace draft {

constexpr unsigned MAXIMUM_TOP_K = 64;

// Index of the first candidate of a level.
__device__ inline unsigned level_start(unsigned level, unsigned top_k) {
    return level == 1 ? 0 : top_k + (level - 2) * top_k * top_k;
}

__device__ inline bool of_level(int candidate, unsigned level, unsigned top_k) {
    return candidate >= int(level_start(level, top_k)) && candidate < int(level_start(level + 1, top_k));
}

// A score with its candidate as one key, 0 for one that does not exist.
__device__ inline unsigned long long existing_key(float value, unsigned id) {
    return value > minus_infinity() ? value_and_id(value, id) : 0;
}

__device__ inline unsigned key_id(unsigned long long key) { return 0xffffffffu - unsigned(key); }

// From the second-level cache, as the kernel may start before the one that writes the row has finished.
template <class T>
__device__ inline void copy_fresh_row(T* target, const T* source, size_t elements, unsigned thread, unsigned threads) {
#pragma unroll 1
    for (size_t i = thread; i < elements; i += threads) target[i] = __ldcg(source + i);
}

__device__ inline void copy_fresh_row(
    char* target, const char* source, size_t row_bytes, unsigned thread, unsigned threads) {
    if (aligned_16(target) && aligned_16(source) && row_bytes % 16 == 0) {
        copy_fresh_row(
            reinterpret_cast<uint4*>(target), reinterpret_cast<const uint4*>(source), row_bytes / 16, thread, threads);
    } else {
        copy_fresh_row(
            reinterpret_cast<short*>(target), reinterpret_cast<const short*>(source), row_bytes / 2, thread, threads);
    }
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

// Lets a token see a key, counted from the first one behind the committed ones, if it is in the range.
__device__ inline void see(unsigned char* mask_row, unsigned keys, long long key) {
    if (key >= 0 && key < keys) mask_row[key] = 1;
}

}  // namespace draft
