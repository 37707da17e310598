// Activations of each element, without a gate, by their numbers in ../encoder/contract.py.
#pragma once

constexpr int NO_ACTIVATION = HOST_NO_ACTIVATION;

// One of them of x; with NO_ACTIVATION x itself.
__device__ __forceinline__ float plain_activation(float x, int activation) {
    if (activation == NO_ACTIVATION) return x;
    if (activation == HOST_PLAIN_GELU) return x * (1.f + erff(x * 0.70710678f)) * 0.5f;
    if (activation == HOST_PLAIN_GELU_TANH) return x * (1.f + tanhf(0.79788456f * fmaf(0.044715f * x * x, x, x))) * 0.5f;
    if (activation == HOST_PLAIN_RELU_SQUARED) return x < 0.f ? 0.f : x * x;
    return x / (1.f + expf(activation == HOST_PLAIN_QUICK_GELU ? -1.702f * x : -x));
}
