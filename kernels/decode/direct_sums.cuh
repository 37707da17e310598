// What the kernels of direct_linear.cu and group_linear.cu have in registers: operands and sums of sixteen rows of
// activations times eight weight rows.
#pragma once
#include "decode/many_rows.cuh"
#include "shared/tile_sums.cuh"

namespace decode {
namespace direct {

constexpr int BLOCK_STEPS = 4;  // of 32 columns, unrolled

__device__ __forceinline__ int own_row() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int own_quad() { return threadIdx.x % 4; }

// What a thread has of the weights of a step: 8 columns of a row of each of the warp's tiles.
template <typename G> struct Held {
    uint4 tiles[G::WEIGHT_TILES];

    // The tensor cores' operand for half a step.
    __device__ uint2 fragment(int c, int half) const {
        return half == 0 ? make_uint2(tiles[c].x, tiles[c].y) : make_uint2(tiles[c].z, tiles[c].w);
    }
};

template <typename G> __device__ __forceinline__ void read_slot(Held<G>& held, unsigned slot) {
#pragma unroll
    for (int c = 0; c < G::WEIGHT_TILES; ++c) held.tiles[c] = read_shared_16(slot + c * G::THREADS * 16);
}

// The tensor cores' operands for both halves of a step, of 8 columns of two rows of activations, eight apart. `zero`, which
// the compiler does not know to be that, keeps it from a copy of its own for each product: four times as many.
__device__ __forceinline__ void order_rows(uint4 (&rows)[2], uint4 low, uint4 high, unsigned zero) {
    rows[0] = make_uint4(low.x | zero, high.x | zero, low.y | zero, high.y | zero);
    rows[1] = make_uint4(low.z | zero, high.z | zero, low.w | zero, high.w | zero);
}

// Of a tile of activations, operands for both halves of a step. Products of one sum stand as far apart as they can:
// each waits for the one before.
template <typename T, typename G>
__device__ __forceinline__ void multiply(
    float (&sum)[G::WEIGHT_TILES][4], const uint4 (&rows)[2], const Held<G>& weights, bool begins) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned a0[2] = {rows[half].x, rows[half].y}, a2[2] = {rows[half].z, rows[half].w};
#pragma unroll
        for (int c = 0; c < G::WEIGHT_TILES; ++c) {
            const uint2 b = weights.fragment(c, half);
            if (half == 0) multiply_add(sum[c], a0, a2, b.x, b.y, begins, T());
            else multiply_add(sum[c], a0, a2, b.x, b.y, T());
        }
    }
}

// What becomes of sums of columns n and n + 1 of row b.
template <typename T, int SUMS, typename Output>
__device__ __forceinline__ void write_sums(
    float2 (&sums)[SUMS], const T* bias, const Output& output, int b, int n, int rows, float2 before) {
#pragma unroll
    for (int s = 0; s < SUMS; ++s) {
        if (bias == nullptr) continue;
        const float2 added = read_two(bias + s * rows + n, n, rows);
        sums[s].x += added.x, sums[s].y += added.y;
    }
    output.two(b, n, rows, sums, before);
}

}  // namespace direct
}  // namespace decode
