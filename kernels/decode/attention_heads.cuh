// What a block brings to shared memory: tiles of committed rows, which keys its tokens have, and the new tokens' queries,
// keys and values made ready: norm, rotary embedding, KV rows.
#pragma once
#include "decode/attention_block.cuh"

namespace decode {
namespace keys_by_position {

// Begins to copy the tiles of a round to the ring. Rows before `start` were written in earlier steps, so they may be read
// before the previous kernel is done. Behind them stand zeros: a weight of 0 must meet the same value wherever a token
// stands.
//
// Rows of int8 come to the second half of their places, from where `expand_tiles` takes them.
template <typename T, int STEPS>
__device__ __forceinline__ void load_tiles(const Block<T, STEPS>& block, const Division& division, int round, int stage) {
    constexpr int LANES_OF_ROW = (STEPS <= 4 ? 8 : STEPS <= 8 ? 16 : 32) / (INT8 ? 2 : 1), AT_ONCE = INT8 ? 16 : 8;
    const int first = threadIdx.x / LANES_OF_ROW, rows_at_once = blockDim.x / LANES_OF_ROW;
    const int column = threadIdx.x % LANES_OF_ROW * AT_ONCE;
    const int slots = round < division.rounds && column < block.PADDED ? block.slots : 0;
#pragma unroll 1
    for (int slot = 0; slot < slots; ++slot) {
        const int tile = block.tile_of(division, slot, round);
        if (tile < 0) continue;
        const int exist = column < block.size ? block.start - tile * KEY_TILE : 0;
        const int place = (stage * block.slots + slot) * KEY_TILE + first;
        unsigned target = shared_address(block.keys + place * block.STRIDE + (INT8 ? block.PADDED + column : 2 * column) / 2);
        int source = (tile * KEY_TILE + first) * block.size + column;
#pragma unroll 4
        for (int row = first; row < KEY_TILE; row += rows_at_once) {
            const bool exists = row < exist;
            copy_async_16(target, block.cached_keys + (exists ? source : 0), exists);
            copy_async_16(target + block.bytes(block.ring), block.cached_values + (exists ? source : 0), exists);
            if (INT8 && column == 0) {
                const int row_of_cache = exists ? tile * KEY_TILE + row : 0;
                const unsigned scale = target + block.PADDED;  // behind the place of the elements
                copy_async_4(scale, block.cached_key_scales + row_of_cache, exists);
                copy_async_4(scale + block.bytes(block.ring), block.cached_value_scales + row_of_cache, exists);
            }
            source += rows_at_once * block.size, target += block.bytes(rows_at_once);
        }
    }
    commit_copies();
}

// Rows of int8 that have come for a round become elements of T, in their places. Each row is one group of lanes' of a warp.
template <typename T, int STEPS>
__device__ __forceinline__ void expand_tiles(const Block<T, STEPS>& block, const Division& division, int round, int stage) {
    constexpr int LANES_OF_ROW = STEPS <= 4 ? 8 : STEPS <= 8 ? 16 : 32;
    const int first = threadIdx.x / LANES_OF_ROW, rows_at_once = blockDim.x / LANES_OF_ROW;
    const int column = threadIdx.x % LANES_OF_ROW * 8;
#pragma unroll 1
    for (int slot = 0; slot < block.slots; ++slot) {
        if (block.tile_of(division, slot, round) < 0) continue;
#pragma unroll 2
        for (int row = first; row < 2 * KEY_TILE; row += rows_at_once) {
            const bool is_value = row >= KEY_TILE;
            const int place = (stage * block.slots + slot) * KEY_TILE + row + (is_value ? block.ring - KEY_TILE : 0);
            T* elements = block.keys + place * block.STRIDE;
            uint2 eight = make_uint2(0u, 0u);
            if (column < block.size) eight = *reinterpret_cast<const uint2*>(elements + (block.PADDED + column) / 2);
            __syncwarp();
            if (column < block.PADDED)
                *reinterpret_cast<uint4*>(elements + column) = expanded<T>(eight, is_value ? 1.f / VALUE_UNIT : 1.f);
        }
    }
    __syncthreads();
}

// Scores of eight keys, from a row of shared memory on, times the scales of these.
template <typename T, int STEPS>
__device__ __forceinline__ void scale_scores(float (&score)[4], const Block<T, STEPS>& block, int row) {
    const float scales[2] = {block.scale_of(row + 2 * (threadIdx.x % 4)), block.scale_of(row + 2 * (threadIdx.x % 4) + 1)};
#pragma unroll
    for (int i = 0; i < 4; ++i) score[i] *= scales[i % 2];
}

// The new tokens that each token sees, and the number of its keys. A warp reads the masks of some tokens at once.
template <typename T, int STEPS> __device__ __forceinline__ void list_keys(const Block<T, STEPS>& block) {
    constexpr int AT_ONCE = 4, HALVES = MAX_TOKENS / 32;
    const int lane = threadIdx.x % 32;
    const bool reads = block.mask != nullptr && !block.masks_all;
#pragma unroll 1
    for (int first = block.warp; first < block.own_count; first += AT_ONCE * block.warps) {
        unsigned char mask[AT_ONCE][HALVES];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int t = first + i * block.warps;
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                const int node = 32 * half + lane;
                const bool exists = t < block.own_count && node < block.tokens && block.start + node < block.mask_keys;
                mask[i][half] = 0;
                if (reads && exists) mask[i][half] = __ldcg(block.mask_of(t) + block.start + node);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int t = first + i * block.warps;
            if (t >= block.own_count) break;
            int count = 0;
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                const int node = 32 * half + lane;
                const bool sees = node < block.tokens &&
                                  (node == block.first_token + t || block.masks_all || mask[i][half] != 0);
                const unsigned bits = __ballot_sync(FULL_WARP, sees);
                if (sees)
                    block.tables->nodes[t][count + __popc(bits & ((1u << lane) - 1))] = static_cast<unsigned char>(node);
                count += __popc(bits);
            }
            if (lane == 0) block.tables->lengths[t] = block.start + count;
        }
    }
}

// How the lanes of a warp share heads: each has two elements and the two that they are rotated with, QUADS times.
template <int STEPS> struct Lanes {
    static constexpr int OF_HEAD = STEPS <= 4 ? 16 : 32, HEADS = 32 / OF_HEAD, QUADS = STEPS <= 8 ? 1 : 2;
};

// The first of two elements and of those that they are rotated with; of those behind the rotated ones, four neighbours.
__device__ __forceinline__ int2 places_of(int quad, int rotary) {
    return 4 * quad < rotary ? make_int2(2 * quad, 2 * quad + rotary / 2) : make_int2(4 * quad, 4 * quad + 2);
}

// What a lane's elements of normed queries and keys are multiplied by.
template <int STEPS> struct NormWeights {
    float2 query[Lanes<STEPS>::QUADS][2], key[Lanes<STEPS>::QUADS][2];
};

// They are constant: read before the previous kernel is done.
template <typename T, int STEPS>
__device__ __forceinline__ void read_norms(NormWeights<STEPS>& norms, const Block<T, STEPS>& block) {
    if (block.q_norm == nullptr) return;
    auto read = [&](const T* weight, int place) {
        const float2 two = unpack<T>(*reinterpret_cast<const unsigned*>(weight + place));
        return make_float2(two.x + block.offset, two.y + block.offset);
    };
#pragma unroll
    for (int q = 0; q < Lanes<STEPS>::QUADS; ++q) {
        const int quad = threadIdx.x % Lanes<STEPS>::OF_HEAD + 32 * q;
        if (4 * quad >= block.size) continue;
        const int2 place = places_of(quad, block.rotary);
        norms.query[q][0] = read(block.q_norm, place.x), norms.query[q][1] = read(block.q_norm, place.y);
        norms.key[q][0] = read(block.k_norm, place.x), norms.key[q][1] = read(block.k_norm, place.y);
    }
}

// A head that is made ready: where it lies in qkv, its row of cos_sin, and where it goes to from new_keys on. `cached`: its
// place in the caches (-1: nowhere).
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
__device__ __forceinline__ void make_heads_ready(const Block<T, STEPS>& block, const NormWeights<STEPS>& norms,
                                                 bool has_new) {
    using Own = Lanes<STEPS>;
    constexpr int QUADS = Own::QUADS, AT_ONCE = 4 / QUADS;
    const int lane = threadIdx.x % Own::OF_HEAD, size = block.size, rotary = block.rotary;
    const int keys = has_new ? block.tokens : 0, items = keys + block.rows, group = threadIdx.x / Own::OF_HEAD;
#pragma unroll 1
    for (int first = block.warp * Own::HEADS; first < items; first += block.warps * Own::HEADS * AT_ONCE) {
        Head<T> head[AT_ONCE];
        float2 low[AT_ONCE][QUADS], high[AT_ONCE][QUADS];
        float4 value[AT_ONCE][QUADS];
        unsigned cosine[AT_ONCE][QUADS], sine[AT_ONCE][QUADS];
        const int own = first - block.warp * Own::HEADS + group;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i * block.warps * Own::HEADS >= items) break;
            head[i] = head_of(block, min(own + i * block.warps * Own::HEADS, items - 1), keys);
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                const int quad = min(lane + 32 * q, size / 4 - 1), turned = 4 * quad < rotary ? 2 * quad : 0;
                const int2 place = places_of(quad, rotary);
                low[i][q] = __ldcg(reinterpret_cast<const float2*>(head[i].source + place.x));
                high[i][q] = __ldcg(reinterpret_cast<const float2*>(head[i].source + place.y));
                cosine[i][q] = sine[i][q] = 0u;
                if (rotary > 0) {
                    cosine[i][q] = __ldcg(reinterpret_cast<const unsigned*>(head[i].rotation + turned));
                    sine[i][q] = __ldcg(reinterpret_cast<const unsigned*>(head[i].rotation + turned + rotary / 2));
                }
                const float* values = head[i].source + (head[i].is_key ? block.kv_heads * size : 0);
                value[i][q] = __ldcg(reinterpret_cast<const float4*>(values + 4 * quad));
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i * block.warps * Own::HEADS >= items) break;
            if (block.q_norm != nullptr) {
                float squares = 0.f;
#pragma unroll
                for (int q = 0; q < QUADS; ++q) {
                    if (4 * (lane + 32 * q) >= size) continue;
                    squares = fmaf(low[i][q].x, low[i][q].x, fmaf(low[i][q].y, low[i][q].y, squares));
                    squares = fmaf(high[i][q].x, high[i][q].x, fmaf(high[i][q].y, high[i][q].y, squares));
                }
#pragma unroll
                for (int other = Own::OF_HEAD / 2; other > 0; other /= 2)
                    squares += __shfl_xor_sync(FULL_WARP, squares, other);
                const float factor = rsqrtf(fmaf(squares, block.inverse_size, block.epsilon));
#pragma unroll
                for (int q = 0; q < QUADS; ++q) {
                    const float2 first_two = head[i].is_key ? norms.key[q][0] : norms.query[q][0];
                    const float2 other_two = head[i].is_key ? norms.key[q][1] : norms.query[q][1];
                    low[i][q].x = low[i][q].x * factor * first_two.x, low[i][q].y = low[i][q].y * factor * first_two.y;
                    high[i][q].x = high[i][q].x * factor * other_two.x, high[i][q].y = high[i][q].y * factor * other_two.y;
                }
            }
            unsigned two[QUADS], other[QUADS];
            uint2 four[QUADS];
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                const bool rotates = 4 * (lane + 32 * q) < rotary;
                const float2 c = rotates ? unpack<T>(cosine[i][q]) : make_float2(1.f, 1.f);
                const float2 s = rotates ? unpack<T>(sine[i][q]) : make_float2(0.f, 0.f);
                const float2 x = low[i][q], y = high[i][q];
                const float4 v = value[i][q];
                two[q] = pack<T>(fmaf(x.x, c.x, -y.x * s.x), fmaf(x.y, c.y, -y.y * s.y));
                other[q] = pack<T>(fmaf(y.x, c.x, x.x * s.x), fmaf(y.y, c.y, x.y * s.y));
                four[q] = make_uint2(pack<T>(v.x, v.y), pack<T>(v.z, v.w));
            }
            float scales[2] = {};
            if (INT8 && has_new) {
                unsigned bits[2] = {};
#pragma unroll
                for (int q = 0; q < QUADS; ++q) {
                    if (4 * (lane + 32 * q) >= size) continue;
                    bits[0] = max(bits[0], max(size_bits(unpack<T>(two[q])), size_bits(unpack<T>(other[q]))));
                    bits[1] = max(bits[1], max(size_bits(unpack<T>(four[q].x)), size_bits(unpack<T>(four[q].y))));
                }
#pragma unroll
                for (int kind = 0; kind < 2; ++kind) scales[kind] = row_scale<Own::OF_HEAD>(bits[kind]);
            }
            if (own + i * block.warps * Own::HEADS >= items) continue;
            T* target = block.new_keys + head[i].target;
            T* value_target = target + block.tokens * block.STRIDE;
            if (INT8 && head[i].is_key && lane == 0) {
                *reinterpret_cast<float*>(target + block.PADDED) = scales[0];
                *reinterpret_cast<float*>(value_target + block.PADDED) = scales[1];
                if (head[i].cached >= 0) {
                    const int row = head[i].cached / size;
                    block.cached_key_scales[row] = scales[0], block.cached_value_scales[row] = scales[1];
                }
            }
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                const int quad = lane + 32 * q;
                if (4 * quad >= size) continue;
                const int2 place = places_of(quad, rotary);
                if constexpr (INT8) {
                    if (head[i].is_key) {
                        auto integers = [&](unsigned pair, float scale, float unit, unsigned& kept) {
                            const float2 x = unpack<T>(pair);
                            const int low = row_integer(x.x, scale), high = row_integer(x.y, scale);
                            kept = (low & 255) | (high & 255) << 8;
                            return pack<T>(low * unit, high * unit);
                        };
                        unsigned kept[4];
                        two[q] = integers(two[q], scales[0], 1.f, kept[0]);
                        other[q] = integers(other[q], scales[0], 1.f, kept[1]);
                        four[q].x = integers(four[q].x, scales[1], 1.f / VALUE_UNIT, kept[2]);
                        four[q].y = integers(four[q].y, scales[1], 1.f / VALUE_UNIT, kept[3]);
                        if (head[i].cached >= 0) {
                            signed char* cached = block.cached_keys + head[i].cached;
                            *reinterpret_cast<unsigned short*>(cached + place.x) = kept[0];
                            *reinterpret_cast<unsigned short*>(cached + place.y) = kept[1];
                            const unsigned values = kept[2] | kept[3] << 16;
                            *reinterpret_cast<unsigned*>(block.cached_values + head[i].cached + 4 * quad) = values;
                        }
                    }
                }
                *reinterpret_cast<unsigned*>(target + place.x) = two[q];
                *reinterpret_cast<unsigned*>(target + place.y) = other[q];
                if (!head[i].is_key) continue;
                *reinterpret_cast<uint2*>(value_target + 4 * quad) = four[q];
                if constexpr (!INT8) {
                    if (head[i].cached < 0) continue;
                    T* cached = block.cached_keys + head[i].cached;
                    *reinterpret_cast<unsigned*>(cached + place.x) = two[q];
                    *reinterpret_cast<unsigned*>(cached + place.y) = other[q];
                    *reinterpret_cast<uint2*>(block.cached_values + head[i].cached + 4 * quad) = four[q];
                }
            }
            // Columns behind the head are multiplied too.
            if (lane == 0 && size < block.PADDED) *reinterpret_cast<uint4*>(target + size) = make_uint4(0u, 0u, 0u, 0u);
        }
    }
}

}  // namespace keys_by_position
}  // namespace decode
