// What becomes of the sums of a product of a row with an expert, whichever kernel makes them.
#pragma once

namespace experts {

// activation(gate) up of gates, then ups, by the activation HOST_GATE; `clamped` of those that alternate; the sums; or relu(sum)^2.
enum Kind { GATED, ALTERNATING, SUMS, SQUARED };

// Those of rows that are `width` wide.
template <typename T> struct SquaredOutput {
    T* output;
    int width;
    static __device__ __forceinline__ float value(float sum) {
        const float own = sum < 0.f ? 0.f : sum;  // NaN stays NaN
        return own * own;
    }
    __device__ float before(int, int, int) const { return 0.f; }
    __device__ void operator()(int b, int n, int, const float (&sum)[1], float) const {
        output[static_cast<size_t>(b) * width + n] = decode::from_float<T>(value(sum[0]));
    }
    __device__ float2 before_two(int, int, int) const { return make_float2(0.f, 0.f); }
    __device__ void two(int b, int n, int rows, const float2 (&sum)[1], float2) const {
        const float2 values = make_float2(value(sum[0].x), value(sum[0].y));
        decode::write_two(output + static_cast<size_t>(b) * width + n, values, n, rows);
    }
};


// (up + 1) gate sigmoid(1.702 gate) of a gate that is at most the limit and an up within it.
__device__ __forceinline__ float clamped(float gate, float up, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return (up + 1.f) * (gate / (1.f + expf(-1.702f * gate)));
}

}  // namespace experts
