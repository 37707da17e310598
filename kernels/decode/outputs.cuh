// What becomes of the sums of the linear layers in linear.cu and tiled_linear.cu. They are multiplied by `scale` at the very
// end: with a scale of 1, which changes no bit, they are what the field's models compute.
#pragma once
#include "decode/common.cuh"

namespace decode {

// What becomes of the sums of one row b of activations and one column n of N (gate and up). `before` is what must be read
// for it: of many outputs, all of it is read before any of them is written.
struct FloatOutput {
    float* output;
    float scale;
    __device__ float before(int, int, int) const { return 0.f; }
    __device__ void operator()(int b, int n, int rows, const float (&sum)[1], float) const {
        output[static_cast<size_t>(b) * rows + n] = sum[0] * scale;
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

// The residual (null: zero) that is added also goes to `kept`, where that is not null, its rows `kept_stride` apart.
template <typename T> struct ResidualOutput {
    float* output;
    float scale;
    const void* residual;
    bool residual_float;
    SelectedRows source;
    T* kept;
    int kept_stride;
    __device__ float before(int b, int n, int rows) const {
        if (residual == nullptr) return 0.f;
        const size_t index = static_cast<size_t>(source(b)) * rows + n;
        return residual_float ? __ldcg(static_cast<const float*>(residual) + index)
                              : to_float(__ldcg(static_cast<const T*>(residual) + index));
    }
    __device__ void operator()(int b, int n, int rows, const float (&sum)[1], float before) const {
        if (kept != nullptr) kept[static_cast<size_t>(b) * kept_stride + n] = from_float<T>(before);
        output[static_cast<size_t>(b) * rows + n] = before + sum[0] * scale;
    }
};

// activation(gate) up, both activations as gate / (1 + exp(-z)): z is the gate itself for silu; for the tanh approximation
// of gelu, (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)), u = sqrt(2 / pi) (gate + 0.044715 gate^3).
template <typename T> struct GatedOutput {
    T* output;
    int activation;
    __device__ float value(float gate, float up) const {
        float z = gate;
        if (activation == HOST_GELU_TANH) z = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
        return gate / (1.f + expf(-z)) * up;
    }
    __device__ float before(int, int, int) const { return 0.f; }
    __device__ void operator()(int b, int n, int rows, const float (&sum)[2], float) const {
        output[static_cast<size_t>(b) * rows + n] = from_float<T>(value(sum[0], sum[1]));
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
    *reinterpret_cast<float4*>(output.output + static_cast<size_t>(b) * rows + n) =
        make_float4(sum[0].x * output.scale, sum[0].y * output.scale, sum[0].z * output.scale, sum[0].w * output.scale);
}

template <typename T>
__device__ __forceinline__ void write_four(
    const ResidualOutput<T>& output, int b, int n, int rows, const float4 (&sum)[1], const float4& before) {
    if (output.kept != nullptr)
        *reinterpret_cast<uint2*>(output.kept + static_cast<size_t>(b) * output.kept_stride + n) =
            make_uint2(pack<T>(before.x, before.y), pack<T>(before.z, before.w));
    *reinterpret_cast<float4*>(output.output + static_cast<size_t>(b) * rows + n) =
        make_float4(before.x + sum[0].x * output.scale, before.y + sum[0].y * output.scale,
                    before.z + sum[0].z * output.scale, before.w + sum[0].w * output.scale);
}

template <typename T>
__device__ __forceinline__ void write_four(
    const GatedOutput<T>& output, int b, int n, int rows, const float4 (&sum)[2], const float4&) {
    *reinterpret_cast<uint2*>(output.output + static_cast<size_t>(b) * rows + n) =
        make_uint2(pack<T>(output.value(sum[0].x, sum[1].x), output.value(sum[0].y, sum[1].y)),
                   pack<T>(output.value(sum[0].z, sum[1].z), output.value(sum[0].w, sum[1].w)));
}

}  // namespace decode
