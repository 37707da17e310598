// Rows of queries, keys and values in shared memory, where 8 elements of a row are read at once by 8 lanes of neighbouring rows;
// those of int8 become T there.
#pragma once
#include "decode/common.cuh"
#include "shared/quantized_rows.cuh"

namespace prefill {

using decode::shared_address;
using quantized::pair_of;

constexpr int WARPS = HOST_WARPS, THREADS = 32 * WARPS;

// Bytes from the beginning of rows in shared memory to 8 elements of one; rows are as long as the padded heads. Which 8
// elements lie where changes from row to row, so that equal columns of 8 rows lie in different banks.
template <int SIZE> __device__ __forceinline__ unsigned offset_of(int row, int chunk) {
    return 2 * SIZE * row + 16 * (chunk ^ (row & 7));
}

// Begins to copy ROWS rows of `size` elements, `stride` apart; zeros stand behind `size`, from row `exist` on, and before row
// `begin`.
template <typename T, int SIZE, int ROWS>
__device__ __forceinline__ void load_rows(unsigned target, const T* source, size_t stride, int exist, int size, int begin) {
    constexpr int CHUNKS = SIZE / 8, AT_ONCE = THREADS / CHUNKS;
    const int thread = decode::in_register(threadIdx.x);  // places are found anew: registers are few
    const int chunk = thread % CHUNKS, first = thread / CHUNKS;
    const T* own = source + first * stride + 8 * chunk;
#pragma unroll
    for (int i = 0; i < ROWS / AT_ONCE; ++i) {
        const int row = first + AT_ONCE * i;
        const bool exists = row < exist && 8 * chunk < size && row >= begin;
        decode::copy_async_16(target + offset_of<SIZE>(row, chunk), exists ? own : source, exists);
        own += AT_ONCE * stride;
    }
}

// The same of rows of int8, `size` apart: each to the second half of its place, from where the same threads' `expand_rows`
// takes it.
template <int SIZE, int ROWS>
__device__ __forceinline__ void load_integers(unsigned target, const char* source, int exist, int size, int begin) {
    constexpr int CHUNKS = SIZE / 16, AT_ONCE = THREADS / CHUNKS;
    const int chunk = threadIdx.x % CHUNKS;
#pragma unroll
    for (int row = threadIdx.x / CHUNKS; row < ROWS; row += AT_ONCE) {
        const bool exists = row < exist && 16 * chunk < size && row >= begin;
        const char* own = source + static_cast<size_t>(row) * size + 16 * chunk;
        decode::copy_async_16(target + 2 * SIZE * row + SIZE + 16 * chunk, exists ? own : source, exists);
    }
}

__device__ __forceinline__ void write_shared_16(unsigned shared, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Makes what the thread brought of ROWS rows of int8 elements of T: of each 16 the even ones, then the odd ones. `bits`: see
// `pair_of`. A row is neighbouring lanes' of a warp.
template <typename T, int SIZE, int ROWS> __device__ __forceinline__ void expand_rows(unsigned rows, unsigned bits) {
    constexpr int CHUNKS = SIZE / 16, AT_ONCE = THREADS / CHUNKS, TURNS = ROWS / AT_ONCE, IN_TURN = TURNS < 4 ? TURNS : 4;
    const int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
#pragma unroll
    for (int turn = 0; turn < TURNS; turn += IN_TURN) {
        uint4 sixteen[IN_TURN];
#pragma unroll
        for (int i = 0; i < IN_TURN; ++i)
            sixteen[i] = decode::read_shared_16(rows + 2 * SIZE * (first + AT_ONCE * (turn + i)) + SIZE + 16 * chunk);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < IN_TURN; ++i) {
            const uint4 x = sixteen[i];
            const int row = first + AT_ONCE * (turn + i);
            write_shared_16(rows + offset_of<SIZE>(row, 2 * chunk), pair_of<0>(x.x, bits, T()), pair_of<0>(x.y, bits, T()),
                            pair_of<0>(x.z, bits, T()), pair_of<0>(x.w, bits, T()));
            write_shared_16(rows + offset_of<SIZE>(row, 2 * chunk + 1), pair_of<1>(x.x, bits, T()),
                            pair_of<1>(x.y, bits, T()), pair_of<1>(x.z, bits, T()), pair_of<1>(x.w, bits, T()));
        }
    }
}

// Puts the columns of a warp's ROWS queries in the order of those of expanded keys.
template <int SIZE, int ROWS> __device__ __forceinline__ void reorder_queries(unsigned rows) {
    constexpr int GROUPS = SIZE / 16;
#pragma unroll 2
    for (int i = threadIdx.x % 32; i < ROWS * GROUPS; i += 32) {
        const unsigned low = rows + offset_of<SIZE>(i / GROUPS, i % GROUPS * 2);
        const unsigned high = rows + offset_of<SIZE>(i / GROUPS, i % GROUPS * 2 + 1);
        const uint4 x = decode::read_shared_16(low), y = decode::read_shared_16(high);
        auto both = [](unsigned a, unsigned b, int which) { return __byte_perm(a, b, which == 0 ? 0x5410 : 0x7632); };
        write_shared_16(low, both(x.x, x.y, 0), both(x.z, x.w, 0), both(y.x, y.y, 0), both(y.z, y.w, 0));
        write_shared_16(high, both(x.x, x.y, 1), both(x.z, x.w, 1), both(y.x, y.y, 1), both(y.z, y.w, 1));
    }
    __syncwarp();
}

}  // namespace prefill
