// Norms of an encoder's heads, each by itself, and of its tokens.
#include "encoder/values.cuh"
#include "shared/reductions.cuh"

namespace encoder {

constexpr unsigned MOST = HOST_MAX_HEAD_SIZE / 32;  // elements of a head that a lane has

// A block has a row, a warp a head at a time. A quarter of each query and key goes where `EncoderAttention` turns it: the
// third, the first, the fourth, the second.
template <class Compute>
__global__ void __launch_bounds__(THREADS) normed_heads(const __grid_constant__ NormedHeadsArguments a) {
    const unsigned lane = threadIdx.x % 32, count = a.W / (3 * a.D), quarter = a.D / 4;
    const size_t first = size_t(blockIdx.x) * a.W;
    begin();
    for (unsigned head = threadIdx.x / 32; head < 3 * count; head += THREADS / 32) {
        const unsigned kind = head / count;
        const Compute* weight = reinterpret_cast<const Compute*>(kind == 0 ? a.query_weight : a.key_weight);
        float values[MOST], squares = 0.f;
#pragma unroll
        for (unsigned i = 0; i < MOST; ++i) {
            const unsigned element = lane + 32 * i;
            values[i] = element < a.D ? __ldcg(a.qkv + first + head * a.D + element) : 0.f;
            squares = fmaf(values[i], values[i], squares);
        }
        const float factor = 1.f / sqrtf(warp_sum(squares) / float(a.D) + float(a.epsilon));
        const float scale = kind == 0 ? sqrtf(float(a.D)) : 1.f;
#pragma unroll
        for (unsigned i = 0; i < MOST; ++i) {
            const unsigned element = lane + 32 * i;
            if (element >= a.D) continue;
            float normed = values[i] * factor;
            unsigned place = element;
            if (kind < 2) {
                const unsigned part = element / quarter;
                normed = normed * to_float(weight[element]) * scale;
                place = element - part * quarter + (part == 0 ? 1 : part == 1 ? 3 : part == 2 ? 0 : 2) * quarter;
            }
            a.output[first + head * a.D + place] = normed;
        }
    }
}

template <class Compute>
__global__ void __launch_bounds__(THREADS) standard_norm(const __grid_constant__ StandardNormArguments a) {
    extern __shared__ float row[];
    __shared__ float partial[MAXIMUM_WARPS];
    const Compute *bias = reinterpret_cast<const Compute*>(a.bias), *scale = reinterpret_cast<const Compute*>(a.scale);
    float squares = 0.f;
    begin();
    for (unsigned column = threadIdx.x; column < a.K; column += THREADS) {
        float value = float(a.factor) * __ldcg(a.values + size_t(blockIdx.x) * a.K + column);
        if (bias != nullptr) value = (value - to_float(bias[column])) * to_float(scale[column]);
        row[column] = value, squares = fmaf(value, value, squares);
    }
    const float factor = 1.f / sqrtf(block_sum(squares, partial) / float(a.K) + float(a.epsilon));
    for (unsigned column = threadIdx.x; column < a.K; column += THREADS)
        a.output[size_t(blockIdx.x) * a.K + column] = row[column] * factor;
}

}  // namespace encoder
