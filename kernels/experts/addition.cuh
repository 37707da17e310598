// The sum of what a row's experts give: in the order of their ids, which is that of its weights, whoever adds.
#pragma once
#include "decode/common.cuh"
#include "shared/last_of.cuh"

namespace experts {

// outputs [rows, chosen, width], weights [rows, chosen]; shared [rows, width] (null: none) and its weights [rows] (null: 1);
// residual [rows, width] (null: 0).
struct Addition {
    const float *outputs, *weights, *shared, *shared_weights;
    const void* residual;
    float* output;
    int chosen, width, residual_float;
    float scale;
};

__device__ __forceinline__ void add_weighted(float4& total, float weight, const float* values) {
    float4 own = __ldcg(reinterpret_cast<const float4*>(values));
    if (weight == 0.f) own = make_float4(0.f, 0.f, 0.f, 0.f);  // other ranks' have never been written
    total.x = fmaf(weight, own.x, total.x), total.y = fmaf(weight, own.y, total.y);
    total.z = fmaf(weight, own.z, total.z), total.w = fmaf(weight, own.w, total.w);
}

// output = residual + scale (the sum of outputs times weights, in order), of four columns of a row.
template <typename T> __device__ __forceinline__ void add_four(const Addition& given, int row, int column) {
    const size_t place = static_cast<size_t>(row) * given.width + column;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f), before = total;
#pragma unroll 8
    for (int number = 0; number < given.chosen; ++number) {
        const size_t pair = static_cast<size_t>(row) * given.chosen + number;
        add_weighted(total, __ldcg(given.weights + pair), given.outputs + pair * given.width + column);
    }
    if (given.shared != nullptr) {
        const float weight = given.shared_weights == nullptr ? 1.f : __ldcg(given.shared_weights + row);
        add_weighted(total, weight, given.shared + place);
    }
    if (given.residual == nullptr) {
    } else if (given.residual_float) {
        before = __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(given.residual) + place));
    } else {
        const uint2 packed = __ldcg(reinterpret_cast<const uint2*>(static_cast<const T*>(given.residual) + place));
        const float2 low = decode::unpack<T>(packed.x), high = decode::unpack<T>(packed.y);
        before = make_float4(low.x, low.y, high.x, high.y);
    }
    *reinterpret_cast<float4*>(given.output + place) =
        make_float4(fmaf(given.scale, total.x, before.x), fmaf(given.scale, total.y, before.y),
                    fmaf(given.scale, total.z, before.z), fmaf(given.scale, total.w, before.w));
}

// Whether the block is the last of `count` to come to a counter, which is then 0 again; all its threads call it, and what the
// others wrote before is then visible to them in the second-level cache.
__device__ __forceinline__ bool comes_last(unsigned* counter, unsigned count) {
    bool is_last = false;
    __syncthreads();
    if (threadIdx.x == 0) is_last = last_of(counter, count);
    return __syncthreads_or(is_last);
}

}  // namespace experts
