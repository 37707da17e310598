// Fragments of the tensor-core instruction, read from shared memory and made of scores.
#pragma once
#include "cuda/decode_common.cuh"

namespace decode {

// Four 8 x 8 matrices of 16-bit elements, one to a register; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(unsigned (&fragment)[4], unsigned shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(shared)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_transposed_matrices(unsigned (&fragment)[4], unsigned shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(shared)
                 : "memory");
}

// 2^exponent; 0 for what lies below normal numbers.
__device__ __forceinline__ float power_of_two(float exponent) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
    return result;
}

}  // namespace decode
