// What the attention kernels share: tiles of keys, and heads of new tokens made ready.
#pragma once
#include "decode_common.cuh"

namespace decode {

constexpr int TILE = 32;  // keys, one a lane
constexpr int KEY_STAGES = 2;
constexpr int PADDING = 8;  // elements between rows in shared memory, against bank conflicts

__device__ __forceinline__ void copy_async(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
                 "l"(global)
                 : "memory");
}

// One head of the new token by one warp: [norm,] rotation, scale; source is float in memory, target float in shared.
template <typename T>
__device__ __forceinline__ void prepare_head(
    const float* source, float* target, const T* norm_weight, float epsilon, const T* cos_sin, float scale, int size,
    int rotary) {
    const int lane = threadIdx.x % 32, half = rotary / 2;
    float squares = 0.f;
#pragma unroll 2
    for (int d = lane; d < size; d += 32) {
        const float value = __ldcg(source + d);
        squares = fmaf(value, value, squares);
        target[d] = value;
    }
    if (norm_weight != nullptr) {
        const float factor = rsqrtf(warp_sum(squares) / size + epsilon);
#pragma unroll 2
        for (int d = lane; d < size; d += 32) target[d] = target[d] * factor * to_float(norm_weight[d]);
    }
    __syncwarp();
#pragma unroll 2
    for (int d = lane; d < half; d += 32) {
        const float cosine = to_float(__ldcg(cos_sin + d)), sine = to_float(__ldcg(cos_sin + half + d));
        const float low = target[d], high = target[half + d];
        target[d] = fmaf(low, cosine, -high * sine) * scale;
        target[half + d] = fmaf(high, cosine, low * sine) * scale;
    }
#pragma unroll 2
    for (int d = rotary + lane; d < size; d += 32) target[d] *= scale;
    __syncwarp();
}

// The place of the set bit that has `before` set bits below it.
__device__ __forceinline__ int place_of_bit(unsigned bits, int before) {
#pragma unroll 1
    for (int i = 0; i < before; ++i) bits &= bits - 1;
    return __ffs(bits) - 1;
}

}  // namespace decode
