// What stands between the linear layers of a conformer (Gulati et al. 2020) in Gemma 4's form: sums of a warp run over its
// lanes' own elements first, so that a row's bits depend on its width and on the rows that it sees alone.
#include "encoder/values.cuh"
#include "shared/reductions.cuh"

namespace encoder {

constexpr unsigned MOST = HOST_MAX_HEAD_SIZE / 32, WARPS = THREADS / 32;  // elements of a head that a lane has

template <int N> __device__ __forceinline__ void load_lane(const float* values, unsigned size, float (&target)[N]) {
#pragma unroll
    for (unsigned i = 0; i < N; ++i) {
        const unsigned element = threadIdx.x % 32 + 32 * i;
        target[i] = element < size ? __ldcg(values + element) : 0.f;
    }
}

template <int N> __device__ __forceinline__ float dot(const float (&left)[N], const float (&right)[N]) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < N; ++i) sum = fmaf(left[i], right[i], sum);
    return warp_sum(sum);
}

// A warp has a row.
template <class Compute>
__global__ void __launch_bounds__(THREADS) centered_norm(const __grid_constant__ CenteredNormArguments a) {
    const size_t row = size_t(blockIdx.x) * WARPS + threadIdx.x / 32;
    const Compute* weight = reinterpret_cast<const Compute*>(a.weight);
    begin();
    if (row >= a.R) return;
    float values[MOST], sum = 0.f;
    load_lane(a.values + row * a.S, a.K, values);
#pragma unroll
    for (unsigned i = 0; i < MOST; ++i) sum += values[i];
    const float mean = warp_sum(sum) / float(a.K);
#pragma unroll
    for (unsigned i = 0; i < MOST; ++i) values[i] = threadIdx.x % 32 + 32 * i < a.K ? values[i] - mean : 0.f;
    float factor = 1.f / sqrtf(dot(values, values) / float(a.K) + float(a.epsilon));
    if (a.mask != nullptr) factor *= __ldcg(a.mask + row);
#pragma unroll
    for (unsigned i = 0; i < MOST; ++i) {
        const unsigned column = threadIdx.x % 32 + 32 * i;
        if (column >= a.K) continue;
        const float normed[1] = {fmaxf(values[i] * factor * to_float(weight[column]), 0.f)};
        store<Compute, 1>(a.output, row * a.K + column, normed);
    }
}

// An RMS norm of a block's row of `value(column)`, each given to `result` before it is weighted. A thread has columns THREADS
// apart, and reads what it has written to shared memory itself.
template <class Value, class Result>
__device__ __forceinline__ void norm_row(unsigned width, double epsilon, Value value, Result result) {
    extern __shared__ float row[];
    __shared__ float partial[MAXIMUM_WARPS];
    float squares = 0.f;
    for (unsigned column = threadIdx.x; column < width; column += THREADS) {
        row[column] = value(column);
        squares = fmaf(row[column], row[column], squares);
    }
    const float factor = 1.f / sqrtf(block_sum(squares, partial) / float(width) + float(epsilon));
    for (unsigned column = threadIdx.x; column < width; column += THREADS) result(column, row[column] * factor);
}

template <class Compute>
__global__ void __launch_bounds__(THREADS) add_normed(const __grid_constant__ AddNormedArguments a) {
    const Compute* weight = reinterpret_cast<const Compute*>(a.weight);
    const size_t first = size_t(blockIdx.x) * a.K;
    begin();
    auto add = [&](unsigned column, float normed) {
        const float residual = __ldcg(a.residual + first + column);
        a.output[first + column] = fmaf(float(a.share), normed * to_float(weight[column]), residual);
    };
    norm_row(a.K, a.epsilon, [&](unsigned column) { return __ldcg(a.values + first + column); }, add);
}

template <class Compute>
__global__ void __launch_bounds__(THREADS) gated_convolution(const __grid_constant__ GatedConvolutionArguments a) {
    const Compute *weight = reinterpret_cast<const Compute*>(a.weight), *norm = reinterpret_cast<const Compute*>(a.norm);
    const unsigned absent = a.W - min(a.W, blockIdx.x + 1);  // rows before the first
    begin();
    auto convolve = [&](unsigned column) {
        float sum = 0.f;
#pragma unroll 4
        for (unsigned k = absent; k < a.W; ++k) {
            const float* values = a.values + size_t(blockIdx.x + k + 1 - a.W) * a.S + column;
            sum = fmaf(to_float(weight[column * a.W + k]), __ldcg(values) / (1.f + expf(-__ldcg(values + a.K))), sum);
        }
        return sum;
    };
    norm_row(a.K, a.epsilon, convolve, [&](unsigned column, float normed) {
        normed *= to_float(norm[column]);
        const float result[1] = {normed / (1.f + expf(-normed))};
        store<Compute, 1>(a.output, size_t(blockIdx.x) * a.K + column, result);
    });
}

// A warp has a row of a head. A lane has the score of the row at its own distance.
template <class Compute>
__global__ void __launch_bounds__(THREADS) local_attention(const __grid_constant__ LocalAttentionArguments a) {
    const unsigned lane = threadIdx.x % 32, warp = blockIdx.x * WARPS + threadIdx.x / 32, size = a.D, count = a.E / size;
    const unsigned row = warp / count, begins = warp % count * size, seen = min(unsigned(a.past), row + 1);
    const Compute* scales = reinterpret_cast<const Compute*>(a.scale);
    begin();
    if (row >= a.R) return;
    const float* own = a.qkv + size_t(row) * a.W + begins;
    float query[MOST], sums[MOST] = {}, score = __int_as_float(0xff800000);
    load_lane(own, size, query);
#pragma unroll
    for (unsigned i = 0; i < MOST; ++i) {
        const float scale = lane + 32 * i < size ? to_float(scales[lane + 32 * i]) : 0.f;
        query[i] *= (fmaxf(scale, 0.f) + log1pf(expf(-fabsf(scale)))) * 1.44269504f / sqrtf(float(size));
    }
#pragma unroll 2
    for (unsigned distance = 0; distance < seen; ++distance) {
        float key[MOST], position[MOST];
        load_lane(own + a.E - size_t(distance) * a.W, size, key);
        load_lane(a.relative + size_t(distance) * a.S + a.first + begins, size, position);
#pragma unroll
        for (unsigned i = 0; i < MOST; ++i) key[i] = fmaf(key[i], 1.89463612f, position[i]);  // ln(1 + e) / ln 2
        const float product = dot(query, key);
        if (lane == distance) score = float(a.cap) * tanhf(product / float(a.cap));
    }
    const float weight = expf(score - warp_maximum(score)), share = weight / warp_sum(weight);
#pragma unroll 4
    for (unsigned distance = 0; distance < seen; ++distance) {
        float value[MOST];
        load_lane(own + 2 * a.E - size_t(distance) * a.W, size, value);
        const float part = __shfl_sync(ALL_LANES, share, distance);
#pragma unroll
        for (unsigned i = 0; i < MOST; ++i) sums[i] = fmaf(part, value[i], sums[i]);
    }
#pragma unroll
    for (unsigned i = 0; i < MOST; ++i) {
        const float result[1] = {sums[i]};
        if (lane + 32 * i < size) store<Compute, 1>(a.context, size_t(row) * a.E + begins + lane + 32 * i, result);
    }
}

}  // namespace encoder
