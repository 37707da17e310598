// Elements of arrays that are of float or of a model's dtype.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T> __device__ __forceinline__ T rounded(float value);
template <> __device__ __forceinline__ float rounded<float>(float value) { return value; }
template <> __device__ __forceinline__ __half rounded<__half>(float value) { return __float2half_rn(value); }
template <> __device__ __forceinline__ __nv_bfloat16 rounded<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}
