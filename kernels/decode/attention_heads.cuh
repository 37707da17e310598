// Which keys a block's tokens have, and their queries, keys and values made ready: norm, rotary embedding, KV rows.
#pragma once
#include "decode/attention_block.cuh"

namespace decode {
namespace keys_by_position {

// Elements of a head that are rotated together; of those behind them, neighbours.
__device__ __forceinline__ int2 places_of_pair(int pair, int rotary) {
    return pair < rotary / 2 ? make_int2(pair, pair + rotary / 2) : make_int2(2 * pair, 2 * pair + 1);
}

// The new tokens that each token sees, and how its keys are divided.
template <typename T> __device__ __forceinline__ void list_keys(const Block<T>& block) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int t = block.warp; t < block.own_count; t += block.warps) {
        const unsigned char* visible = block.mask_of(t) + block.start;
        int count = 0;
#pragma unroll 1
        for (int node = lane; node < (block.tokens > 32 ? 64 : 32); node += 32) {
            const bool sees = node < block.tokens && (node == block.first_token + t || block.masks_all ||
                                                      (block.mask != nullptr && block.start + node < block.mask_keys &&
                                                       __ldcg(visible + node) != 0));
            const unsigned bits = __ballot_sync(FULL_WARP, sees);
            if (sees) block.tables->nodes[t][count + __popc(bits & ((1u << lane) - 1))] = static_cast<unsigned char>(node);
            count += __popc(bits);
        }
        if (lane == 0) {
            const int length = block.start + count, each = each_of(length, block.span_bits);
            block.tables->lengths[t] = length, block.tables->divisions[t] = make_int2(each, groups_of(length, each));
        }
    }
}

// The heads that a block makes ready, `keys` new keys (with their values) and then its queries: x, where it lies in qkv
// (-1: nowhere); y, its row of cos_sin; z, where it goes to from new_keys on; w, where it goes to in the caches (-1: nowhere).
template <typename T> __device__ __forceinline__ void list_heads(const Block<T>& block, int keys, bool writes) {
#pragma unroll 1
    for (int item = threadIdx.x; item < keys + block.row_tiles * ROWS; item += blockDim.x) {
        const bool is_key = item < keys;
        const int row = item - keys, t = is_key ? item - block.first_token : block.token_of(row);
        const int token = block.sequence * block.tokens + block.first_token + t;
        const int head = is_key ? block.heads + block.kv_head : block.kv_head * block.group + block.head_of(row);
        const int source = is_key || t >= 0 ? (token * (block.heads + 2 * block.kv_heads) + head) * block.size : -1;
        const bool caches = is_key && writes && t >= 0 && t < block.own_count;
        block.tables->heads[item] =
            make_int4(source, source < 0 ? 0 : token * block.rotary,
                      (is_key ? item : 2 * block.tokens + row) * block.stride,
                      caches ? (block.start + item) * block.size : -1);
    }
}

// The factors of the first `items` heads' norms.
template <typename T> __device__ __forceinline__ void compute_norms(const Block<T>& block, int items) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int item = block.warp; item < items; item += block.warps) {
        const float* source = block.qkv + max(block.tables->heads[item].x, 0);
        float squares = 0.f;
#pragma unroll 2
        for (int d = lane; d < block.size; d += 32) {
            const float value = __ldcg(source + d);
            squares = fmaf(value, value, squares);
        }
        squares = warp_sum(squares);
        if (lane == 0) block.tables->factors[item] = rsqrtf(squares / block.size + block.epsilon);
    }
}

// Norm and rotary embedding of the heads as list_heads has them, to where they go.
template <typename T> __device__ __forceinline__ void make_heads_ready(const Block<T>& block, int keys) {
    constexpr int AT_ONCE = 4;
    const int size = block.size, rotary = block.rotary, items = keys + block.row_tiles * ROWS;
#pragma unroll 1
    for (int pair = threadIdx.x % 32; pair < size / 2; pair += 32) {
        const int2 place = places_of_pair(pair, rotary);
        const bool rotates = pair < rotary / 2;
#pragma unroll 1
        for (int first = block.warp; first < items; first += block.warps * AT_ONCE) {
            float low[AT_ONCE], high[AT_ONCE], cosine[AT_ONCE], sine[AT_ONCE];
            float2 value[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int item = first + i * block.warps;
                const int4 head = block.tables->heads[min(item, items - 1)];
                const float* source = block.qkv + max(head.x, 0);
                const T* rotation = block.cos_sin + head.y + (rotates ? pair : 0);
                low[i] = __ldcg(source + place.x), high[i] = __ldcg(source + place.y);
                cosine[i] = to_float(__ldcg(rotation)), sine[i] = to_float(__ldcg(rotation + rotary / 2));
                if (item < keys) value[i] = __ldcg(reinterpret_cast<const float2*>(source + block.kv_heads * size + 2 * pair));
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int item = first + i * block.warps;
                const int4 head = block.tables->heads[min(item, items - 1)];
                if (item >= items || head.x < 0) continue;
                if (block.q_norm != nullptr) {
                    const T* norm = item < keys ? block.k_norm : block.q_norm;
                    const float factor = block.tables->factors[item];
                    low[i] = low[i] * factor * block.norm_weight(norm[place.x]);
                    high[i] = high[i] * factor * block.norm_weight(norm[place.y]);
                }
                const T first_half = from_float<T>(rotates ? fmaf(low[i], cosine[i], -high[i] * sine[i]) : low[i]);
                const T second_half = from_float<T>(rotates ? fmaf(high[i], cosine[i], low[i] * sine[i]) : high[i]);
                T* target = block.new_keys + head.z;
                target[place.x] = first_half, target[place.y] = second_half;
                if (item >= keys) continue;
                const unsigned both = pack<T>(value[i].x, value[i].y);
                *reinterpret_cast<unsigned*>(target + block.tokens * block.stride + 2 * pair) = both;
                if (head.w < 0) continue;
                block.cached_keys[head.w + place.x] = first_half, block.cached_keys[head.w + place.y] = second_half;
                *reinterpret_cast<unsigned*>(block.cached_values + head.w + 2 * pair) = both;
            }
        }
    }
}

}  // namespace keys_by_position
}  // namespace decode
