// Which keys a block's tokens have, and their queries, keys and values made ready: norm, rotary embedding, KV rows.
#pragma once
#include "decode/attention_block.cuh"

namespace decode {
namespace keys_by_position {

// Elements of a head that are rotated together; of those behind them, neighbours.
__device__ __forceinline__ int2 places_of_pair(int pair, int rotary) {
    return pair < rotary / 2 ? make_int2(pair, pair + rotary / 2) : make_int2(2 * pair, 2 * pair + 1);
}

// The new tokens that each token sees, and the number of its keys.
template <typename T, int STEPS> __device__ __forceinline__ void list_keys(const Block<T, STEPS>& block) {
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
        if (lane == 0) block.tables->lengths[t] = block.start + count;
    }
}

// What a lane's elements of normed queries and keys are multiplied by.
template <int PAIRS> struct NormWeights {
    float query[PAIRS][2], key[PAIRS][2];
};

// They are constant: read before the previous kernel is done.
template <typename T, int STEPS>
__device__ __forceinline__ void read_norms(NormWeights<(STEPS + 3) / 4>& norms, const Block<T, STEPS>& block) {
    if (block.q_norm == nullptr) return;
#pragma unroll
    for (int p = 0; p < (STEPS + 3) / 4; ++p) {
        const int2 place = places_of_pair(min(static_cast<int>(threadIdx.x % 32) + 32 * p, block.size / 2 - 1), block.rotary);
        norms.query[p][0] = block.norm_weight(block.q_norm[place.x]), norms.query[p][1] = block.norm_weight(block.q_norm[place.y]);
        norms.key[p][0] = block.norm_weight(block.k_norm[place.x]), norms.key[p][1] = block.norm_weight(block.k_norm[place.y]);
    }
}

// A head that a warp makes ready: where it lies in qkv, its row of cos_sin, and where it goes to from new_keys on.
// `cached`: its place in the caches (-1: nowhere).
template <typename T> struct Head {
    const float* source;
    const T* rotation;
    int target, cached;
    bool is_key;
};

// Item number `item` of `keys` new keys (with their values) and then the queries.
template <typename T, int STEPS>
__device__ __forceinline__ Head<T> head_of(const Block<T, STEPS>& block, int item, int keys) {
    Head<T> head;
    head.is_key = item < keys;
    const int row = item - keys, t = head.is_key ? item - block.first_token : block.token_of(row);
    const int own = row - t * block.group, token = block.sequence * block.tokens + block.first_token + t;
    const int place = head.is_key ? block.heads + block.kv_head : block.kv_head * block.group + own;
    head.source = block.qkv + (token * (block.heads + 2 * block.kv_heads) + place) * block.size;
    head.rotation = block.cos_sin + token * block.rotary;
    const int tile = t * block.tile_inverse >> 16;
    const int query = 2 * block.tokens + tile * ROWS + (t - tile * block.tile_tokens) * block.group + own;
    head.target = (head.is_key ? item : query) * block.STRIDE;
    head.cached = head.is_key && t >= 0 && t < block.own_count ? (block.start + item) * block.size : -1;
    return head;
}

// Norm and rotary embedding of the block's queries, and of the new tokens' keys if it has them, to shared memory; the
// block's own tokens' keys and values to the caches too.
template <typename T, int STEPS>
__device__ __forceinline__ void make_heads_ready(const Block<T, STEPS>& block, const NormWeights<(STEPS + 3) / 4>& norms,
                                                 bool has_new) {
    constexpr int PAIRS = (STEPS + 3) / 4, AT_ONCE = PAIRS > 2 ? 2 : 4;  // of a lane; heads of a warp
    const int lane = threadIdx.x % 32, size = block.size, rotary = block.rotary;
    const int keys = has_new ? block.tokens : 0, items = keys + block.rows;
#pragma unroll 1
    for (int first = block.warp; first < items; first += block.warps * AT_ONCE) {
        Head<T> head[AT_ONCE];
        float low[AT_ONCE][PAIRS], high[AT_ONCE][PAIRS], cosine[AT_ONCE][PAIRS], sine[AT_ONCE][PAIRS];
        float2 value[AT_ONCE][PAIRS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int item = first + i * block.warps;
            if (item >= items) break;
            head[i] = head_of(block, item, keys);
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) {
                const int pair = min(lane + 32 * p, size / 2 - 1);
                const int2 place = places_of_pair(pair, rotary);
                const bool rotates = pair < rotary / 2;
                low[i][p] = __ldcg(head[i].source + place.x), high[i][p] = __ldcg(head[i].source + place.y);
                cosine[i][p] = rotates ? to_float(__ldcg(head[i].rotation + pair)) : 1.f;
                sine[i][p] = rotates ? to_float(__ldcg(head[i].rotation + pair + rotary / 2)) : 0.f;
                const float* values = head[i].source + (head[i].is_key ? block.kv_heads * size : 0);
                value[i][p] = __ldcg(reinterpret_cast<const float2*>(values + 2 * pair));
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i * block.warps >= items) break;
            T* target = block.new_keys + head[i].target;
            if (block.q_norm != nullptr) {
                float squares = 0.f;
#pragma unroll
                for (int p = 0; p < PAIRS; ++p)
                    if (lane + 32 * p < size / 2) squares = fmaf(low[i][p], low[i][p], fmaf(high[i][p], high[i][p], squares));
                const float factor = rsqrtf(fmaf(warp_sum(squares), block.inverse_size, block.epsilon));
#pragma unroll
                for (int p = 0; p < PAIRS; ++p) {
                    low[i][p] = low[i][p] * factor * (head[i].is_key ? norms.key[p][0] : norms.query[p][0]);
                    high[i][p] = high[i][p] * factor * (head[i].is_key ? norms.key[p][1] : norms.query[p][1]);
                }
            }
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) {
                const int pair = lane + 32 * p;
                if (pair >= size / 2) continue;
                const int2 place = places_of_pair(pair, rotary);
                const T x = from_float<T>(fmaf(low[i][p], cosine[i][p], -high[i][p] * sine[i][p]));
                const T y = from_float<T>(fmaf(high[i][p], cosine[i][p], low[i][p] * sine[i][p]));
                target[place.x] = x, target[place.y] = y;
                if (!head[i].is_key) continue;
                const unsigned both = pack<T>(value[i][p].x, value[i][p].y);
                *reinterpret_cast<unsigned*>(target + block.tokens * block.STRIDE + 2 * pair) = both;
                if (head[i].cached < 0) continue;
                T* cached = block.cached_keys + head[i].cached;
                cached[place.x] = x, cached[place.y] = y;
                *reinterpret_cast<unsigned*>(block.cached_values + head[i].cached + 2 * pair) = both;
            }
            // Columns behind the head are multiplied too.
            if (lane < block.PADDED - size) target[size + lane] = from_float<T>(0.f);
        }
    }
}

}  // namespace keys_by_position
}  // namespace decode
