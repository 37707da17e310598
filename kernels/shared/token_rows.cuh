// What a step reads of one token: rows of tables, the row of a causal mask.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifdef EMBEDDING_MODE  // of a packed table, with EMBEDDING_SCALES: see packed_blocks.cuh
#include "decode/packed_blocks.cuh"
#endif
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

#ifdef EMBEDDING_MODE
// A row of a packed table, as device_layout.py says, its columns in eights: every four threads have 128 of them.
template <class Compute>
__device__ inline void unpack_row(
    const char* table, unsigned row, Compute* target, unsigned columns, unsigned thread, unsigned threads) {
    using namespace decode::packed;
    const unsigned blocks = (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
    constexpr int BLOCK_BYTES = Format<EMBEDDING_SCALES, EMBEDDING_MODE>::BLOCK_BYTES;
    const char* begin = table + size_t(row / 8) * blocks * BLOCK_BYTES;
#pragma unroll 1
    for (unsigned i = thread; i < 4 * blocks; i += threads) {
        Lane<EMBEDDING_SCALES, EMBEDDING_MODE> lane;
        lane.read(GlobalBlock{begin + size_t(i / 4) * BLOCK_BYTES}, row % 8);
        decode::packed::Group<Compute, EMBEDDING_MODE> group;
#pragma unroll
        for (int step = 0; step < BLOCK_STEPS; ++step) {
            unsigned four[4], column = i / 4 * BLOCK_COLUMNS + step * 32 + own_quad() * 8;
            lane.begin(group, step, decode::packed::LOW);
            lane.values(group, step, LOW, four);
            if (column < columns) *reinterpret_cast<uint4*>(target + column) = make_uint4(four[0], four[1], four[2], four[3]);
        }
    }
}
#endif

#ifdef EMBEDDING_PIECES
// Of a table whose rows so many GPUs share, in the order of ids, `places` are where each has its own: what has a token's row,
// and which it is there.
__device__ inline const char* piece_with(const char* places, int& token_id, unsigned vocabulary) {
    const unsigned long long* begins = reinterpret_cast<const unsigned long long*>(places);
    const unsigned id = token_id;
    unsigned long long found = __ldg(begins);
#pragma unroll
    for (unsigned piece = 1; piece < EMBEDDING_PIECES; ++piece) {
        const unsigned first = vocabulary * piece / EMBEDDING_PIECES;
        const unsigned long long begin = __ldg(begins + piece);  // loaded in any case, while the id is under way
        if (id >= first) found = begin, token_id = id - first;
    }
    return reinterpret_cast<const char*>(found);
}
#endif

// The row of a token id, H elements; zeros for an unknown id. Threads are those of a block from its first one on.
template <class Compute>
__device__ inline void look_up(
    const char* table, int token_id, char* target, unsigned vocabulary, unsigned columns, unsigned threads = blockDim.x) {
    const bool known = token_id >= 0 && unsigned(token_id) < vocabulary;
    const size_t row_bytes = columns * sizeof(Compute);
#ifdef EMBEDDING_PIECES
    if (known) table = piece_with(table, token_id, vocabulary);
#endif
#ifdef EMBEDDING_MODE
    if (known) {
        unpack_row(table, token_id, reinterpret_cast<Compute*>(target), columns, threadIdx.x, threads);
        return;
    }
#endif
    copy_bytes(target, known ? table + size_t(token_id) * row_bytes : nullptr, row_bytes, threadIdx.x, threads);
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
