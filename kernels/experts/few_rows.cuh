// Products of rows with the experts that each of them chose: a block has a pair of a row and an expert, and multiplies what
// its place in the grid says of the expert's matrix as a block of decode/linear.cuh or decode/packed_rows.cuh does with one
// row of activations. So a pair has the bits of the dense layer that the expert is, and a captured graph serves any choice.
#pragma once
#include "decode/few_rows.cuh"
#include "experts/outputs.cuh"

namespace experts {

using decode::Linear;

// `linear` is the first expert's; the next one's weight begins `stride` bytes and its bias `biases` elements further. Pair p
// is of row p / sharing of the input, and of row p of the output; `limit`: see Clamped.
struct Product {
    Linear linear;
    const int* expert_ids;
    const void* input;
    void* output;
    unsigned long long stride;
    int experts, biases, sharing;
    float limit;
};
static_assert(sizeof(Product) == HOST_PRODUCT_BYTES, "as the host's structure");

// `clamped` of columns n and n + 1.
template <typename T> struct Clamped {
    T* output;
    float limit;
    __device__ float before(int, int, int) const { return 0.f; }
    // Of threads beside each other, the first has the gate, the second the up.
    __device__ void operator()(int, int n, int, const float (&sum)[1], float) const {
        const float up = __shfl_down_sync(3u << (threadIdx.x % 32 & ~1u), sum[0], 1);
        if (n % 2 == 0) output[n / 2] = decode::from_float<T>(clamped(sum[0], up, limit));
    }
    __device__ float2 before_two(int, int, int) const { return make_float2(0.f, 0.f); }
    __device__ void two(int, int n, int, const float2 (&sum)[1], float2) const {
        output[n / 2] = decode::from_float<T>(clamped(sum[0].x, sum[0].y, limit));
    }
};

template <typename T, int KIND> __device__ __forceinline__ auto output_of(const Product& given, int pair) {
    const size_t first = static_cast<size_t>(pair) * given.linear.rows;  // of gates, their ups are not counted
    if constexpr (KIND == GATED) return decode::GatedOutput<T>{static_cast<T*>(given.output) + first, HOST_SILU};
    else if constexpr (KIND == ALTERNATING) return Clamped<T>{static_cast<T*>(given.output) + first / 2, given.limit};
    else return decode::FloatOutput{static_cast<float*>(given.output) + first, 1.f, given.linear.rows};
}

template <typename T> __device__ __forceinline__ const T* input_of(const Product& given, int pair) {
    return static_cast<const T*>(given.input) + static_cast<size_t>(pair / given.sharing) * given.linear.columns;
}

// The layer of the expert of a pair.
template <typename T> __device__ __forceinline__ Linear layer_of(const Product& given, int pair) {
    const int expert = min(max(__ldcg(given.expert_ids + pair), 0), given.experts - 1);
    Linear own = given.linear;
    own.weight = static_cast<const char*>(own.weight) + expert * given.stride;
    if (own.bias != nullptr) own.bias = static_cast<const T*>(own.bias) + static_cast<size_t>(expert) * given.biases;
    return own;
}

}  // namespace experts
