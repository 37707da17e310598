// Columns of rows, each row by itself: parts of a row that are divided by their root mean square, columns that take the
// place of others, and what a token's own embeddings of a layer let through. Every sum is of one warp, so that its order
// depends on the width alone.
#include "decode/activations.cuh"
#include "decode/outputs.cuh"

namespace decode {

constexpr int LANES = 32;

// Eight columns a lane: the sum of their squares over a row of float.
__device__ __forceinline__ float sum_of_squares(const float* row, int width) {
    float squares = 0.f;
    for (int column = threadIdx.x * 8; column < width; column += LANES * 8) {
        float eight[8];
        load8_float(row + column, eight);
#pragma unroll
        for (int j = 0; j < 8; ++j) squares = fmaf(eight[j], eight[j], squares);
    }
    return warp_sum(squares);
}

__device__ __forceinline__ void store8(float* target, const float (&values)[8]) {
    float4* place = reinterpret_cast<float4*>(target);
    place[0] = make_float4(values[0], values[1], values[2], values[3]);
    place[1] = make_float4(values[4], values[5], values[6], values[7]);
}

// The first `width` columns of rows of float, `stride` apart, become those of `columns` [rows, width]. Grid (ceil(width / (8
// LANES)), rows).
template <typename T>
__global__ void __launch_bounds__(LANES) insert_columns(const float* columns, float* rows, int width, int stride) {
    launch_next_kernel();
    wait_for_previous_kernel();
    const int column = (blockIdx.x * LANES + threadIdx.x) * 8;
    if (column >= width) return;
    float eight[8];
    load8_float(columns + static_cast<size_t>(blockIdx.y) * width + column, eight);
    store8(rows + static_cast<size_t>(blockIdx.y) * stride + column, eight);
}

// values: rows of float, `stride` apart as those of `own`, of T. Parts of `width` columns become where they are `share` times
// the sum of themselves behind an RMS norm by weight + offset, and of scale times their `own`. Grid (parts, rows); what a lane
// writes it has read.
template <typename T>
__global__ void __launch_bounds__(LANES) token_inputs(float* values, const T* own, const T* weight, int width, int stride,
                                                      float epsilon, float offset, float scale, float share) {
    launch_next_kernel();
    wait_for_previous_kernel();
    const size_t first = static_cast<size_t>(blockIdx.y) * stride + blockIdx.x * width;
    values += first, own += first;
    const float factor = rsqrtf(sum_of_squares(values, width) / static_cast<float>(width) + epsilon);
    for (int column = threadIdx.x * 8; column < width; column += LANES * 8) {
        float through[8], before[8], weights[8];
        load8_float(values + column, through);
        unpack8<T>(__ldcg(reinterpret_cast<const uint4*>(own + column)), before);
        unpack8<T>(__ldg(reinterpret_cast<const uint4*>(weight + column)), weights);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float normed = through[j] * factor * (weights[j] + offset);
            through[j] = fmaf(scale, before[j], normed) * share;
        }
        store8(values + column, through);
    }
}

// output [rows, width] of T = activation(gate) times `through`, rows of float that are `stride` apart. Grid (ceil(width / (8
// LANES)), rows).
template <typename T>
__global__ void __launch_bounds__(LANES)
    token_gate(const float* gate, const float* through, T* output, int width, int stride, int activation) {
    launch_next_kernel();
    wait_for_previous_kernel();
    const int column = (blockIdx.x * LANES + threadIdx.x) * 8;
    if (column >= width) return;
    const size_t first = static_cast<size_t>(blockIdx.y) * width + column;
    const GatedOutput<T> gated{output, activation};
    float gates[8], passed[8];
    load8_float(gate + first, gates);
    load8_float(through + static_cast<size_t>(blockIdx.y) * stride + column, passed);
#pragma unroll
    for (int j = 0; j < 8; ++j) passed[j] = gated.value(gates[j], passed[j]);
    *reinterpret_cast<uint4*>(output + first) = pack8<T>(passed);
}

}  // namespace decode
