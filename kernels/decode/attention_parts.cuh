// What attention over some keys leaves of a row, and how such parts are merged.
#pragma once
#include "decode/attention_block.cuh"

namespace decode {
namespace keys_by_position {

// What some keys leave of a row: the largest score (log2), the sum of weights, a lane's share of the weighted values.
template <int PAIRS> struct Part {
    float maximum, total, sum[PAIRS][2];
};

template <int PAIRS> __device__ __forceinline__ void clear(Part<PAIRS>& part) {
    part.maximum = LOWEST, part.total = 0.f;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) part.sum[i][0] = part.sum[i][1] = 0.f;
}

template <int PAIRS> __device__ __forceinline__ void add(Part<PAIRS>& result, const Part<PAIRS>& part) {
    const float factor = power_of_two(part.maximum - result.maximum);
    result.total = fmaf(part.total, factor, result.total);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        result.sum[i][0] = fmaf(part.sum[i][0], factor, result.sum[i][0]);
        result.sum[i][1] = fmaf(part.sum[i][1], factor, result.sum[i][1]);
    }
}

// The spans of a group, in their order.
template <int PAIRS> __device__ __forceinline__ Part<PAIRS> merge_group(const Part<PAIRS> (&parts)[GROUP]) {
    Part<PAIRS> result;
    clear(result);
#pragma unroll
    for (int i = 0; i < GROUP; ++i) result.maximum = fmaxf(result.maximum, parts[i].maximum);
#pragma unroll
    for (int i = 0; i < GROUP; ++i) add(result, parts[i]);
    return result;
}

// A part as it lies in global memory: maximum, total, two places unused, sums.
template <int PAIRS> __device__ __forceinline__ Part<PAIRS> read_part(const float* source, bool exists, int size) {
    Part<PAIRS> part;
    clear(part);
    if (!exists) return part;
    const float2 state = __ldcg(reinterpret_cast<const float2*>(source));
    part.maximum = state.x, part.total = state.y;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int column = 2 * (threadIdx.x % 32) + 64 * i;
        if (column >= size) continue;
        const float2 sum = __ldcg(reinterpret_cast<const float2*>(source + 4 + column));
        part.sum[i][0] = sum.x, part.sum[i][1] = sum.y;
    }
    return part;
}

template <int PAIRS> __device__ __forceinline__ void write_part(float* target, const Part<PAIRS>& part, int size) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) __stcg(reinterpret_cast<float2*>(target), make_float2(part.maximum, part.total));
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
        const int column = 2 * lane + 64 * p;
        if (column < size) __stcg(reinterpret_cast<float2*>(target + 4 + column), make_float2(part.sum[p][0], part.sum[p][1]));
    }
}

// Merges the parts that groups left of a row, in their order.
template <int PAIRS> __device__ __forceinline__ Part<PAIRS> merge_groups(const float* parts, int count, int size) {
    constexpr int AT_ONCE = 8 / PAIRS;
    const int lane = threadIdx.x % 32, distance = size + 4;
    Part<PAIRS> whole, part[AT_ONCE];
    auto read = [&](int first) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) part[i] = read_part<PAIRS>(parts + (first + i) * distance, first + i < count, size);
    };
    read(0);
    clear(whole);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) whole.maximum = fmaxf(whole.maximum, part[i].maximum);
#pragma unroll 1
    for (int i = AT_ONCE; i < count; i += 32) {
        const float maximum = i + lane < count ? __ldcg(parts + (i + lane) * distance) : LOWEST;
        whole.maximum = fmaxf(whole.maximum, warp_max(maximum));
    }
#pragma unroll 1
    for (int first = 0; first < count; first += AT_ONCE) {
        if (first > 0) read(first);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) add(whole, part[i]);
    }
    return whole;
}

template <typename T, int PAIRS>
__device__ __forceinline__ void write_row(T* result, const Part<PAIRS>& whole, int size) {
    const float inverse = 1.f / whole.total;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int column = 2 * (threadIdx.x % 32) + 64 * i;
        if (column < size)
            *reinterpret_cast<unsigned*>(result + column) = pack<T>(whole.sum[i][0] * inverse, whole.sum[i][1] * inverse);
    }
}

// Merges the spans of the rows whose spans have `each` tiles: the result, where this block is the only one, or a part.
template <typename T, int PAIRS> __device__ __forceinline__ void merge_spans(const Block<T>& block, int each) {
    const int lane = threadIdx.x % 32, size = block.size;
#pragma unroll 1
    for (int row = block.warp; row < block.row_tiles * ROWS; row += block.warps) {
        const int t = block.token_of(row);
        if (t < 0 || block.tables->divisions[t].x != each || block.split >= block.tables->divisions[t].y) continue;
        Part<PAIRS> part[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            const float* span = block.spans + (i * block.row_tiles * ROWS + row) * block.stride;
            part[i].maximum = span[block.padded], part[i].total = span[block.padded + 1];
            const bool exists = part[i].total > 0.f;  // or its sums were never written
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) {
                const int column = 2 * lane + 64 * p;
                const float2 sum = exists && column < size ? *reinterpret_cast<const float2*>(span + column)
                                                            : make_float2(0.f, 0.f);
                part[i].sum[p][0] = sum.x, part[i].sum[p][1] = sum.y;
            }
        }
        const Part<PAIRS> merged = merge_group(part);
        const size_t result = block.result_of(row, t);
        if (block.blocks == 1) write_row(block.context + result * size, merged, size);
        else write_part(block.partial + (result * block.states + block.split) * (size + 4), merged, size);
    }
}

// Merges the parts that all blocks left of a block's rows.
template <typename T, int PAIRS> __device__ __forceinline__ void merge_blocks(const Block<T>& block) {
    const int size = block.size;
#pragma unroll 1
    for (int row = block.warp; row < block.row_tiles * ROWS; row += block.warps) {
        const int t = block.token_of(row);
        if (t < 0) continue;
        const size_t result = block.result_of(row, t);
        const float* parts = block.partial + result * block.states * (size + 4);
        const Part<PAIRS> whole = merge_groups<PAIRS>(parts, block.tables->divisions[t].y, size);
        write_row(block.context + result * size, whole, size);
    }
}

}  // namespace keys_by_position
}  // namespace decode
