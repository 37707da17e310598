// What the recurrent kernels share: values of several dtypes, and sums in one order, that of `ordered_sum` in twin.py.
// Modules are compiled without fused multiply-add, so that a product and its sum are one operation only where fmaf says so.
#pragma once
#include "recurrent/arguments.cuh"
#include "shared/elements.cuh"
#include "shared/portable_math.cuh"
#include "shared/programmatic_launch.cuh"

namespace recurrent {

constexpr unsigned LANES = 16, WIDTH = 64;  // of a sum, and the elements that they add side by side, four each

// An element of what an earlier kernel wrote: from the second-level cache, as that may have run beside this one.
template <class T> __device__ __forceinline__ float loaded(const char* values, size_t place) {
    return to_float(__ldcg(reinterpret_cast<const T*>(values) + place));
}

// A node's parent: an earlier node, or -1.
__device__ __forceinline__ int earlier(int parent, int node) { return parent >= 0 && parent < node ? parent : -1; }

// What the lanes of a group hold, added: halves, then halves of these. The group's lanes all get it.
__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
    for (unsigned offset = LANES / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

__device__ __forceinline__ float reciprocal_root(float value) { return __fdiv_rn(1.0f, __fsqrt_rn(value)); }

// A lane's share of the sum of x y, each product and each sum rounded. Element 64 m + 4 lane + c of a vector is member c of
// a lane's x[m].
template <int PARTS> __device__ __forceinline__ float share(const float4 (&x)[PARTS], const float4 (&y)[PARTS]) {
    float4 sums = make_float4(x[0].x * y[0].x, x[0].y * y[0].y, x[0].z * y[0].z, x[0].w * y[0].w);
#pragma unroll
    for (int part = 1; part < PARTS; ++part) {
        sums.x += x[part].x * y[part].x, sums.y += x[part].y * y[part].y;
        sums.z += x[part].z * y[part].z, sums.w += x[part].w * y[part].w;
    }
    return (sums.x + sums.y) + (sums.z + sums.w);
}

// The same, a product and its sum rounded at once.
template <int PARTS> __device__ __forceinline__ float fused_share(const float4 (&x)[PARTS], const float4 (&y)[PARTS]) {
    float4 sums = make_float4(x[0].x * y[0].x, x[0].y * y[0].y, x[0].z * y[0].z, x[0].w * y[0].w);
#pragma unroll
    for (int part = 1; part < PARTS; ++part) {
        sums.x = fmaf(x[part].x, y[part].x, sums.x), sums.y = fmaf(x[part].y, y[part].y, sums.y);
        sums.z = fmaf(x[part].z, y[part].z, sums.z), sums.w = fmaf(x[part].w, y[part].w, sums.w);
    }
    return (sums.x + sums.y) + (sums.z + sums.w);
}

template <int PARTS> __device__ __forceinline__ void scale(float4 (&x)[PARTS], float factor) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        x[part].x *= factor, x[part].y *= factor, x[part].z *= factor, x[part].w *= factor;
    }
}

// A lane's elements of a vector of `size` float32, a multiple of four; zeros behind them.
template <int PARTS>
__device__ __forceinline__ void load_vector(const float* vector, unsigned lane, unsigned size, float4 (&x)[PARTS]) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const unsigned first = part * WIDTH + 4 * lane;
        x[part] = first < size ? __ldcg(reinterpret_cast<const float4*>(vector + first)) : make_float4(0, 0, 0, 0);
    }
}

}  // namespace recurrent
