// Reductions and scans over a block of whole warps, and the finish of a reduction over several blocks of one row.
#pragma once

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr unsigned MAXIMUM_WARPS = 32;

template <class T>
__device__ inline T warp_maximum(T value) {
    for (int offset = 16; offset > 0; offset /= 2) {
        T other = __shfl_xor_sync(ALL_LANES, value, offset);
        value = other > value ? other : value;
    }
    return value;
}

template <class T>
__device__ inline T warp_sum(T value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

// Sum over this lane and those before it.
template <class T>
__device__ inline T warp_inclusive_sum(T value) {
    unsigned lane = threadIdx.x % 32;
    for (unsigned offset = 1; offset < 32; offset *= 2) {
        T other = __shfl_up_sync(ALL_LANES, value, offset);
        if (lane >= offset) value += other;
    }
    return value;
}

// The block's maximum, in thread 0. `partial` is shared memory; the block is synchronized before it is used again.
template <class T>
__device__ inline T block_maximum(T value, T (&partial)[MAXIMUM_WARPS]) {
    value = warp_maximum(value);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x < 32) value = warp_maximum(threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : T(0));
    __syncthreads();
    return value;
}

// The block's sum, in every thread.
template <class T>
__device__ inline T block_sum(T value, T (&partial)[MAXIMUM_WARPS]) {
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    T total = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += partial[warp];
    __syncthreads();
    return total;
}

// Sum over this thread and those before it.
template <class T>
__device__ inline T block_inclusive_sum(T value, T (&partial)[MAXIMUM_WARPS]) {
    value = warp_inclusive_sum(value);
    unsigned warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 31) partial[warp] = value;
    __syncthreads();
    for (unsigned before = 0; before < warp; ++before) value += partial[before];
    __syncthreads();
    return value;
}
