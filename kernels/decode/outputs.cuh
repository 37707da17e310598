// What becomes of the sums of the linear layers in linear.cu and tiled_linear.cu. They are multiplied by `scale` at the very
// end: with a scale of 1, which changes no bit, they are what the field's models compute.
#pragma once
#include "decode/common.cuh"

namespace decode {

// Two values of neighbouring columns, the first of which is even, of a row of `width`: at once where rows begin evenly.
// Behind the last column nothing is read or written.
__device__ __forceinline__ float2 read_two(const float* values, int column, int width) {
    if (width % 2 == 0) return __ldcg(reinterpret_cast<const float2*>(values));
    return make_float2(__ldcg(values), column + 1 < width ? __ldcg(values + 1) : 0.f);
}
template <typename T> __device__ __forceinline__ float2 read_two(const T* values, int column, int width) {
    if (width % 2 == 0) return unpack<T>(__ldcg(reinterpret_cast<const unsigned*>(values)));
    return make_float2(to_float(__ldcg(values)), column + 1 < width ? to_float(__ldcg(values + 1)) : 0.f);
}
__device__ __forceinline__ void write_two(float* target, float2 values, int column, int width) {
    if (width % 2 == 0) {
        *reinterpret_cast<float2*>(target) = values;
    } else {
        target[0] = values.x;
        if (column + 1 < width) target[1] = values.y;
    }
}
template <typename T> __device__ __forceinline__ void write_two(T* target, float2 values, int column, int width) {
    if (width % 2 == 0) {
        *reinterpret_cast<unsigned*>(target) = pack<T>(values.x, values.y);
    } else {
        target[0] = from_float<T>(values.x);
        if (column + 1 < width) target[1] = from_float<T>(values.y);
    }
}

// What becomes of the sums of one row b of activations and one column n of N (gate and up), or of columns n, which is even,
// and n + 1. `before` is what must be read for it: of many outputs, all of it is read before any of them is written.
struct FloatOutput {
    float* output;
    float scale;
    int width;
    __device__ float before(int, int, int) const { return 0.f; }
    __device__ void operator()(int b, int n, int, const float (&sum)[1], float) const {
        output[static_cast<size_t>(b) * width + n] = sum[0] * scale;
    }
    __device__ float2 before_two(int, int, int) const { return make_float2(0.f, 0.f); }
    __device__ void two(int b, int n, int rows, const float2 (&sum)[1], float2) const {
        write_two(output + static_cast<size_t>(b) * width + n, make_float2(sum[0].x * scale, sum[0].y * scale), n, rows);
    }
};

__device__ __forceinline__ FloatOutput float_output(void* output, const Linear& linear) {
    return {static_cast<float*>(output), linear.scale, linear.width};
}

// Row b of activations and residual: `selected[b]` of each `tokens`, where that is not null.
struct SelectedRows {
    const int* selected;
    int tokens;
    __device__ int operator()(int b) const {
        return selected == nullptr ? b : b * tokens + min(max(__ldcg(selected + b), 0), tokens - 1);
    }
};

// The residual (null: zero) that is added also goes to `kept`, where that is not null, its rows `kept_stride` apart. Layers
// of some rows alone have neither.
template <typename T> struct ResidualOutput {
    float* output;
    float scale;
    int width;
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
        output[static_cast<size_t>(b) * width + n] = before + sum[0] * scale;
    }
    __device__ float2 before_two(int b, int n, int rows) const {
        if (residual == nullptr) return make_float2(0.f, 0.f);
        const size_t index = static_cast<size_t>(source(b)) * rows + n;
        return residual_float ? read_two(static_cast<const float*>(residual) + index, n, rows)
                              : read_two(static_cast<const T*>(residual) + index, n, rows);
    }
    __device__ void two(int b, int n, int rows, const float2 (&sum)[1], float2 before) const {
        if (kept != nullptr) write_two(kept + static_cast<size_t>(b) * kept_stride + n, before, n, rows);
        const float2 values = make_float2(before.x + sum[0].x * scale, before.y + sum[0].y * scale);
        write_two(output + static_cast<size_t>(b) * width + n, values, n, rows);
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
    __device__ float2 before_two(int, int, int) const { return make_float2(0.f, 0.f); }
    __device__ void two(int b, int n, int rows, const float2 (&sum)[2], float2) const {
        const float2 values = make_float2(value(sum[0].x, sum[1].x), value(sum[0].y, sum[1].y));
        write_two(output + static_cast<size_t>(b) * rows + n, values, n, rows);
    }
};

// activation(sum) times a column of rows of float, `stride` apart.
template <typename T> struct ThroughOutput {
    GatedOutput<T> gated;
    const float* through;
    int stride;
    __device__ float before(int b, int n, int) const { return __ldcg(through + static_cast<size_t>(b) * stride + n); }
    __device__ void operator()(int b, int n, int rows, const float (&sum)[1], float before) const {
        gated.output[static_cast<size_t>(b) * rows + n] = from_float<T>(gated.value(sum[0], before));
    }
    __device__ float2 before_two(int b, int n, int rows) const {
        return read_two(through + static_cast<size_t>(b) * stride + n, n, rows);
    }
    __device__ void two(int b, int n, int rows, const float2 (&sum)[1], float2 before) const {
        const float2 values = make_float2(gated.value(sum[0].x, before.x), gated.value(sum[0].y, before.y));
        write_two(gated.output + static_cast<size_t>(b) * rows + n, values, n, rows);
    }
};

}  // namespace decode
