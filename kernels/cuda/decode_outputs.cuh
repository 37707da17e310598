// What becomes of the sums of the linear layers in decode_linear.cu and decode_tiled_linear.cu.
#pragma once
#include "cuda/decode_common.cuh"

namespace decode {

// What becomes of the sums of one row b of activations and one column n of N (gate and up).
struct FloatOutput {
    float* output;
    __device__ void operator()(int b, int n, int rows, const float (&sum)[1]) const {
        output[static_cast<size_t>(b) * rows + n] = sum[0];
    }
};

// Row b of activations and residual: `selected[b]` of each `tokens`, where that is not null.
struct SelectedRows {
    const int* selected;
    int tokens;
    __device__ int operator()(int b) const {
        return selected == nullptr ? b : b * tokens + min(max(__ldcg(selected + b), 0), tokens - 1);
    }
};

// The residual (null: zero) that is added also goes to `features`, where that is not null, its rows `feature_stride` apart.
template <typename T> struct ResidualOutput {
    float* output;
    const void* residual;
    bool residual_float;
    SelectedRows source;
    T* features;
    int feature_stride;
    __device__ void operator()(int b, int n, int rows, const float (&sum)[1]) const {
        float before = 0.f;
        if (residual != nullptr) {
            const size_t index = static_cast<size_t>(source(b)) * rows + n;
            before = residual_float ? __ldcg(static_cast<const float*>(residual) + index)
                                    : to_float(__ldcg(static_cast<const T*>(residual) + index));
        }
        if (features != nullptr) features[static_cast<size_t>(b) * feature_stride + n] = from_float<T>(before);
        output[static_cast<size_t>(b) * rows + n] = before + sum[0];
    }
};

template <typename T> struct SiluOutput {
    T* output;
    __device__ void operator()(int b, int n, int rows, const float (&sum)[2]) const {
        output[static_cast<size_t>(b) * rows + n] = from_float<T>(sum[0] / (1.f + expf(-sum[0])) * sum[1]);
    }
};

// What becomes of four neighbouring sums, where rows are a multiple of four: first what must be read for it, then the rest.
template <typename Output> __device__ __forceinline__ float4 read_before(const Output&, int, int, int) {
    return make_float4(0.f, 0.f, 0.f, 0.f);
}

template <typename T>
__device__ __forceinline__ float4 read_before(const ResidualOutput<T>& output, int b, int n, int rows) {
    if (output.residual == nullptr) return make_float4(0.f, 0.f, 0.f, 0.f);
    const size_t index = static_cast<size_t>(output.source(b)) * rows + n;
    if (output.residual_float)
        return __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(output.residual) + index));
    const uint2 packed = __ldcg(reinterpret_cast<const uint2*>(static_cast<const T*>(output.residual) + index));
    const float2 low = unpack<T>(packed.x), high = unpack<T>(packed.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

__device__ __forceinline__ void write_four(
    const FloatOutput& output, int b, int n, int rows, const float4 (&sum)[1], const float4&) {
    *reinterpret_cast<float4*>(output.output + static_cast<size_t>(b) * rows + n) = sum[0];
}

template <typename T>
__device__ __forceinline__ void write_four(
    const ResidualOutput<T>& output, int b, int n, int rows, const float4 (&sum)[1], const float4& before) {
    if (output.features != nullptr)
        *reinterpret_cast<uint2*>(output.features + static_cast<size_t>(b) * output.feature_stride + n) =
            make_uint2(pack<T>(before.x, before.y), pack<T>(before.z, before.w));
    *reinterpret_cast<float4*>(output.output + static_cast<size_t>(b) * rows + n) =
        make_float4(before.x + sum[0].x, before.y + sum[0].y, before.z + sum[0].z, before.w + sum[0].w);
}

template <typename T>
__device__ __forceinline__ void write_four(
    const SiluOutput<T>& output, int b, int n, int rows, const float4 (&sum)[2], const float4&) {
    const auto silu = [](float gate, float up) { return gate / (1.f + expf(-gate)) * up; };
    *reinterpret_cast<uint2*>(output.output + static_cast<size_t>(b) * rows + n) =
        make_uint2(pack<T>(silu(sum[0].x, sum[1].x), silu(sum[0].y, sum[1].y)),
                   pack<T>(silu(sum[0].z, sum[1].z), silu(sum[0].w, sum[1].w)));
}

}  // namespace decode
