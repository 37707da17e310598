// The state that a span of keys leaves of a row, and how the states of a row's spans are merged: one after the other, in
// the order of the keys, by the warp that computed all of them or by whoever finds them in memory.
#pragma once
#include "decode/attention_block.cuh"
#include "shared/last_of.cuh"

namespace decode {
namespace keys_by_position {

// Of a lane's two rows, as tensor cores hold sums: the largest score (log2), the sum of weights, weighted values.
template <int STEPS> struct Whole {
    float maximum[2], total[2], sum[2 * STEPS][4];
};
template <> struct Whole<0> {};  // of warps that share a row's spans
// The steps of 16 columns that a warp has sums of.
template <int STEPS> constexpr int OWN_STEPS = TILE_WARPS == 1 ? STEPS : CHUNK_STEPS<STEPS>;

__device__ __forceinline__ void clear(Whole<0>&) {}
template <int STEPS> __device__ __forceinline__ void clear(Whole<STEPS>& whole) {
#pragma unroll
    for (int half = 0; half < 2; ++half) whole.maximum[half] = LOWEST, whole.total[half] = 0.f;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i)
        whole.sum[i][0] = whole.sum[i][1] = whole.sum[i][2] = whole.sum[i][3] = 0.f;
}

// The context of one of a lane's two rows.
template <typename T, int STEPS>
__device__ __forceinline__ void write_row(const Block<T, STEPS>& block, const Whole<OWN_STEPS<STEPS>>& whole, int row,
                                          int half) {
    const int begin = block.PART * block.part() + block.template chunk_begin<0>();
    T* context = block.context + block.result_of(row) * block.size + begin;
    const float inverse = block.inverse_of(row, whole.maximum[half], whole.total[half]);
#pragma unroll
    for (int i = 0; i < 2 * OWN_STEPS<STEPS>; ++i) {
        if (!block.has_eight(begin / 8 + i)) continue;
        *reinterpret_cast<unsigned*>(context + column_of<INT8>(i)) =
            pack<T>(neighbour<0, INT8>(whole.sum, i, half) * inverse, neighbour<1, INT8>(whole.sum, i, half) * inverse);
    }
}

// Merges the states of the block's rows `first`, and every 2^step_bits-th from there on, in the columns of its part. Through
// the second-level cache, where other blocks wrote them. Those of some rows and SPANS are on their way together, whether or not
// they exist: a trip takes longer than what is done with it.
template <bool THROUGH_L2, typename T, int STEPS>
__device__ __forceinline__ void merge_states(const Block<T, STEPS>& block, int first, int step_bits) {
    constexpr int LANES_OF_ROW = 4 * STEPS / parts_of(STEPS), SPANS = TILE_WARPS == 1 ? 8 : 4;
    constexpr int AT_ONCE = THROUGH_L2 ? TILE_WARPS : 1;
    const int size = block.size, stride = state_stride_of(size);
    const int items = ((block.rows - first + (1 << step_bits) - 1) >> step_bits) * LANES_OF_ROW;
    const int distance = THROUGH_L2 ? stride : block.own_rows * stride;
#pragma unroll 1
    for (int begin = threadIdx.x; begin < items; begin += AT_ONCE * blockDim.x) {
        const float* state[AT_ONCE];
        int row[AT_ONCE], column[AT_ONCE], last[AT_ONCE], most = 0;
        float maximum[AT_ONCE], total[AT_ONCE];
        float4 sum[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int item = min(begin + i * static_cast<int>(blockDim.x), items - 1), place = item / LANES_OF_ROW;
            row[i] = first + (place << step_bits);
            column[i] = min(block.PART * block.part() + 4 * (item % LANES_OF_ROW), size - 4);
            const int length = block.length_of(block.token_of(row[i])), bits = block.bits_of(length);
            last[i] = ((tiles_of(length) + (1 << bits) - 1) >> bits) - 1, most = max(most, last[i]);
            state[i] = THROUGH_L2 ? block.partial + block.result_of(row[i]) * block.states * stride
                                  : block.own_states + place * stride;
            maximum[i] = LOWEST, total[i] = 0.f, sum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        }
#pragma unroll 1
        for (int span = 0; span <= most; span += SPANS) {
            float2 weights[AT_ONCE][SPANS];
            float4 values[AT_ONCE][SPANS];
#pragma unroll
            for (int n = 0; n < AT_ONCE * SPANS; ++n) {
                const int i = n / SPANS;
                const float* own = state[i] + min(span + n % SPANS, last[i]) * distance;
                const float2* head = reinterpret_cast<const float2*>(own);
                const float4* tail = reinterpret_cast<const float4*>(own + 4 + column[i]);
                weights[i][n % SPANS] = THROUGH_L2 ? __ldcg(head) : *head;
                values[i][n % SPANS] = THROUGH_L2 ? __ldcg(tail) : *tail;
            }
#pragma unroll
            for (int n = 0; n < AT_ONCE * SPANS; ++n) {
                const int i = n / SPANS;
                if (span + n % SPANS > last[i]) continue;
                const float4 own = values[i][n % SPANS];
                const float2 factors = next_maximum(maximum[i], weights[i][n % SPANS].x);
                add_part(total[i], weights[i][n % SPANS].y, factors);
                add_part(sum[i].x, own.x, factors), add_part(sum[i].y, own.y, factors);
                add_part(sum[i].z, own.z, factors), add_part(sum[i].w, own.w, factors);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {  // items that do not exist write what the last does
            const float inverse = block.inverse_of(row[i], maximum[i], total[i]);
            *reinterpret_cast<uint2*>(block.context + block.result_of(row[i]) * size + column[i]) = make_uint2(
                pack<T>(sum[i].x * inverse, sum[i].y * inverse), pack<T>(sum[i].z * inverse, sum[i].w * inverse));
        }
    }
}

// Once all spans that the block's warps have are computed: merges the states of its rows, in its own memory or, of blocks
// that are no cluster, in the last one to come here.
template <typename T, int STEPS> __device__ __forceinline__ void merge_shares(const Block<T, STEPS>& block) {
    if (block.in_cluster && block.active > 1) {
        arrive_at_cluster();
        wait_for_cluster();
    } else {
        __syncthreads();
    }
    if (block.split_bits == 0 || block.in_cluster) {
        if (block.split >> block.owner_bits == 0) merge_states<false>(block, block.split, block.owner_bits);
        return;
    }
    if (threadIdx.x == 0) {  // behind a barrier of the block
        unsigned* counter = block.counters + (blockIdx.z * block.kv_heads + block.kv_head) * block.PARTS + block.part();
        block.tables->is_last_block = last_of(counter, block.active);
    }
    __syncthreads();
    if (block.tables->is_last_block) merge_states<true>(block, 0, 0);
}

}  // namespace keys_by_position
}  // namespace decode
