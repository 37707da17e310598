// What becomes of the sums of the linear layers in decode_linear.cu and decode_tiled_linear.cu.
#pragma once
#include "decode_common.cuh"

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

}  // namespace decode
