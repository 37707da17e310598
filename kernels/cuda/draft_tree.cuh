// What the kernels of the draft tree share: numbering of candidates, selection of the best keys, rows of one token.
#pragma once

#include "embedding_lookup.cuh"
#include "ordered_keys.cuh"
#include "prepare_attention.cuh"

namespace draft {

constexpr unsigned THREADS = 512;         // of blocks that call best_keys
constexpr unsigned MAXIMUM_KEYS = 4096;  // in best_keys
constexpr unsigned MAXIMUM_TOP_K = 64;
static_assert(THREADS >= MAXIMUM_TOP_K && THREADS % 128 == 0, "best_keys gives each thread one of the best keys");

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

// Lanes whose maxima best_keys compares as one: the fewer comparisons, the more keys are left to be ranked.
__device__ inline unsigned group_lanes(unsigned top_k) { return top_k <= 16 ? THREADS / 32 : THREADS / 128; }

// Keys that best_keys needs shared memory for.
__device__ inline unsigned gathered_keys(unsigned top_k) { return group_lanes(top_k) * (MAXIMUM_KEYS / THREADS) * top_k; }

// The block's `top_k` largest keys, descending, to best[0..top_k), 0 where there are no more. `keys` are different from
// each other or 0; thread t itself wrote keys[t], keys[t + THREADS], ... `gathered` is shared memory for
// gathered_keys(top_k) keys, `best` for top_k.
//
// The top_k-th largest of the groups' maxima bounds the result from below, so few keys are left to be ranked. Loops stay
// loops: between two calls so much else runs that code comes from memory again, and that takes longer than the work.
__device__ __noinline__ void best_keys(
    const unsigned long long* keys, unsigned count, unsigned top_k, unsigned long long* gathered,
    unsigned long long* best) {
    __shared__ unsigned long long maxima[128];
    __shared__ unsigned long long bound;
    __shared__ unsigned number;
    unsigned long long own = 0;
#pragma unroll 2
    for (unsigned i = threadIdx.x; i < count; i += THREADS) own = keys[i] > own ? keys[i] : own;
    unsigned lanes = group_lanes(top_k), groups = THREADS / lanes;
    unsigned long long maximum = own;
#pragma unroll 1
    for (unsigned offset = 1; offset < lanes; offset *= 2) {
        unsigned long long other = __shfl_xor_sync(0xffffffffu, maximum, offset);
        maximum = other > maximum ? other : maximum;
    }
    if (threadIdx.x % lanes == 0) maxima[threadIdx.x / lanes] = maximum;
    if (threadIdx.x == 0) bound = 1, number = 0;
    if (threadIdx.x < top_k) best[threadIdx.x] = 0;
    __syncthreads();
    if (threadIdx.x < groups) {
        maximum = maxima[threadIdx.x];
        unsigned rank = 0;
#pragma unroll 8
        for (unsigned other = 0; other < groups; ++other) rank += maxima[other] > maximum;
        if (maximum != 0 && rank == top_k - 1) bound = maximum;
    }
    __syncthreads();
    if (own >= bound) {
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < count; i += THREADS) {
            if (keys[i] >= bound) gathered[atomicAdd(&number, 1u)] = keys[i];
        }
    }
    __syncthreads();
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < number; i += THREADS) {
        unsigned long long key = gathered[i];
        unsigned place = 0;
#pragma unroll 4
        for (unsigned other = 0; other < number; ++other) place += gathered[other] > key;
        if (place < top_k) best[place] = key;
    }
    __syncthreads();
}

// From the second-level cache, as the kernel may start before the one that writes the row has finished.
template <class T>
__device__ inline void copy_fresh_row(T* target, const T* source, size_t elements) {
#pragma unroll 1
    for (size_t i = threadIdx.x; i < elements; i += blockDim.x) target[i] = __ldcg(source + i);
}

__device__ inline void copy_fresh_row(char* target, const char* source, size_t row_bytes) {
    if (aligned_16(target) && aligned_16(source) && row_bytes % 16 == 0) {
        copy_fresh_row(reinterpret_cast<uint4*>(target), reinterpret_cast<const uint4*>(source), row_bytes / 16);
    } else {
        copy_fresh_row(reinterpret_cast<short*>(target), reinterpret_cast<const short*>(source), row_bytes / 2);
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
