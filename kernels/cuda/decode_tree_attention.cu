// Attention of the up to 64 new tokens of a tree: decode_attention.cu for many tokens, with the same bits.
//
// A block serves a few tokens and up to four query heads of one key-value head: so few tokens read the keys anew. A warp
// takes one token and one split of its keys at a time; what the splits leave is merged by the same block, in their order.
#include "decode_heads.cuh"

namespace decode {
namespace tree {

constexpr int HEADS = 4;    // query heads of a warp
constexpr int MAX_OWN = 4;  // tokens of a block

__device__ __forceinline__ int place_of_bit(unsigned long long bits, int before) {
#pragma unroll 1
    for (int i = 0; i < before; ++i) bits &= bits - 1;
    return __ffsll(static_cast<long long>(bits)) - 1;
}

// How the keys of a token are split: as in decode_attention.cu.
struct Splits {
    unsigned long long seen;  // the new tokens that are keys of this one
    int length, tiles, tiles_each, active;

    __device__ void divide(int start, int splits) {
        length = start + __popcll(seen);
        tiles = (length + TILE - 1) / TILE, tiles_each = (tiles + splits - 1) / splits;
        active = (tiles + tiles_each - 1) / tiles_each;
    }
};

// What the sums of a warp's heads are after some keys.
template <int PAIRS> struct State {
    float maximum[HEADS], total[HEADS], sum[HEADS][PAIRS][2];

    __device__ void reset() {
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            maximum[h] = LOWEST, total[h] = 0.f;
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) sum[h][pair][0] = 0.f, sum[h][pair][1] = 0.f;
        }
    }
};

// One tile of `count` keys for `heads` heads. `keys`, `values`: the block's rows in shared memory; a lane's key is row
// `own_row` of them, and the first `committed` rows follow each other. queries: [HEADS, size]; weights: [HEADS, TILE].
template <typename T, int PAIRS>
__device__ __forceinline__ void attend(
    State<PAIRS>& state, const T* keys, const T* values, const float* queries, float* weights, int own_row,
    int committed, int count, int heads, int size, int stride) {
    const int lane = threadIdx.x % 32;
    float even[HEADS] = {}, odd[HEADS] = {};
    if (lane < count) {
        const T* key_row = keys + own_row * stride;
#pragma unroll 2
        for (int chunk = 0; chunk < size / 8; ++chunk) {
            float key[8];
            unpack8<T>(*reinterpret_cast<const uint4*>(key_row + chunk * 8), key);
#pragma unroll
            for (int h = 0; h < HEADS; ++h) {
                if (h >= heads) continue;
                const float4* query = reinterpret_cast<const float4*>(queries + h * size) + 2 * chunk;
                const float4 low = query[0], high = query[1];
                even[h] = fmaf(low.x, key[0], even[h]), odd[h] = fmaf(low.y, key[1], odd[h]);
                even[h] = fmaf(low.z, key[2], even[h]), odd[h] = fmaf(low.w, key[3], odd[h]);
                even[h] = fmaf(high.x, key[4], even[h]), odd[h] = fmaf(high.y, key[5], odd[h]);
                even[h] = fmaf(high.z, key[6], even[h]), odd[h] = fmaf(high.w, key[7], odd[h]);
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        if (h >= heads) continue;
        const float score = lane < count ? even[h] + odd[h] : LOWEST;
        const float larger = fmaxf(state.maximum[h], warp_max(score));
        const float correction = exp2f(state.maximum[h] - larger), weight = exp2f(score - larger);
        state.total[h] = fmaf(state.total[h], correction, warp_sum(weight));
        state.maximum[h] = larger;
        weights[h * TILE + lane] = weight;
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) state.sum[h][pair][0] *= correction, state.sum[h][pair][1] *= correction;
    }
    __syncwarp();
    auto add = [&](int row, const float (&factor)[HEADS]) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair)
            if (2 * lane + 64 * pair < size) {
                const T* place = values + row * stride + 2 * lane + 64 * pair;
                const float2 value = unpack<T>(*reinterpret_cast<const unsigned*>(place));
#pragma unroll
                for (int h = 0; h < HEADS; ++h) {
                    if (h >= heads) continue;
                    state.sum[h][pair][0] = fmaf(factor[h], value.x, state.sum[h][pair][0]);
                    state.sum[h][pair][1] = fmaf(factor[h], value.y, state.sum[h][pair][1]);
                }
            }
    };
    const int first_row = __shfl_sync(FULL_WARP, own_row, 0);
    int key = 0;
#pragma unroll 1
    for (; key + 4 <= committed; key += 4) {
        float4 four[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; ++h) four[h] = *reinterpret_cast<const float4*>(weights + h * TILE + key);
        add(first_row + key, {four[0].x, four[1].x, four[2].x, four[3].x});
        add(first_row + key + 1, {four[0].y, four[1].y, four[2].y, four[3].y});
        add(first_row + key + 2, {four[0].z, four[1].z, four[2].z, four[3].z});
        add(first_row + key + 3, {four[0].w, four[1].w, four[2].w, four[3].w});
    }
#pragma unroll 1
    for (; key < count; ++key)
        add(__shfl_sync(FULL_WARP, own_row, key),
            {weights[key], weights[TILE + key], weights[2 * TILE + key], weights[3 * TILE + key]});
    __syncwarp();
}

// Grid (groups of own_tokens tokens, key-value heads times groups of HEADS query heads, sequences). Block: own_tokens
// times `slots` warps. mask [tokens of all sequences, keys]. splits: of the keys, at most; partial [tokens of all
// sequences, query heads, splits, size + 2].
template <typename T, int PAIRS>
__device__ __forceinline__ void attention(
    const float* qkv, const T* q_norm, const T* k_norm, float epsilon, const T* cos_sin, const int* start_index,
    const unsigned char* mask, T* k_cache, T* v_cache, T* context, float* partial, float scale, int group, int size,
    int rotary, int kv_heads, int kv_rows, int tokens, int mask_keys, int splits, int own_tokens) {
    extern __shared__ __align__(16) char shared[];
    __shared__ Splits of_token[MAX_OWN];
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int slots = warps / own_tokens, slot = warp / own_tokens, own = warp % own_tokens;
    const int kv_head = blockIdx.y % kv_heads, first_head = blockIdx.y / kv_heads * HEADS;
    const int heads = min(HEADS, group - first_head), all_heads = group * kv_heads, b = blockIdx.z;
    const int first_token = blockIdx.x * own_tokens, token = first_token + own;
    const int own_count = min(own_tokens, tokens - first_token);
    const int stride = size + PADDING, ring_rows = KEY_STAGES * slots * TILE;
    T* keys = reinterpret_cast<T*>(shared);                  // [KEY_STAGES, slots, TILE, stride], [tokens, stride]
    T* values = keys + (ring_rows + tokens) * stride;        // the same
    float* queries = reinterpret_cast<float*>(values + (ring_rows + tokens) * stride);  // [own_tokens, HEADS, size]
    float* own_floats = queries + own_tokens * HEADS * size + warp * max(HEADS * TILE, size);

    launch_next_kernel();
    const int start = min(__ldcg(start_index + b), kv_rows - tokens);
    if (slot == 0 && own < own_count) {
        const unsigned char* visible = mask + (static_cast<size_t>(b) * tokens + token) * mask_keys + start;
        unsigned bits[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int node = lane + 32 * i;
            bits[i] = __ballot_sync(FULL_WARP, node == token || (node < tokens && start + node < mask_keys &&
                                                                 __ldcg(visible + node) != 0));
        }
        Splits found;
        found.seen = static_cast<unsigned long long>(bits[1]) << 32 | bits[0];
        found.divide(start, splits);
        if (lane == 0) of_token[own] = found;
    }
    __syncthreads();
    unsigned long long seen_by_any = 0;
    int least_each = of_token[0].tiles_each, most_each = least_each;
#pragma unroll 1
    for (int i = 0; i < own_count; ++i) {
        seen_by_any |= of_token[i].seen;
        least_each = min(least_each, of_token[i].tiles_each), most_each = max(most_each, of_token[i].tiles_each);
    }
    const Splits mine = of_token[min(own, own_count - 1)];
    const T* cached_keys = k_cache + (static_cast<size_t>(b) * kv_heads + kv_head) * kv_rows * size;
    const T* cached_values = v_cache + (static_cast<size_t>(b) * kv_heads + kv_head) * kv_rows * size;

    // Tokens whose splits have `each` tiles: in iteration i, slot s has tile i % each of split i / each * slots + s.
    auto tile_of = [&](int iteration, int each, int s) {
        return (iteration / each * slots + s) * each + iteration % each;
    };
    // Rows before `start` were written in earlier steps, so they may be read before the previous kernel is done.
    auto load = [&](int iteration, int each) {
        const int chunks = size / 8, stage = iteration % KEY_STAGES;
#pragma unroll 2
        for (int i = threadIdx.x; i < slots * TILE * chunks; i += blockDim.x) {
            const int place = i / chunks, column = i % chunks * 8;
            const int row = tile_of(iteration, each, place / TILE) * TILE + place % TILE;
            if (row >= start) continue;
            const int target = (stage * slots * TILE + place) * stride + column;
            copy_async(keys + target, cached_keys + static_cast<size_t>(row) * size + column);
            copy_async(values + target, cached_values + static_cast<size_t>(row) * size + column);
        }
        commit_copies();
    };
#pragma unroll 1
    for (int i = 0; i < KEY_STAGES; ++i) load(i, least_each);

    wait_for_previous_kernel();
    const int width = (all_heads + 2 * kv_heads) * size;
    const float* new_tokens = qkv + static_cast<size_t>(b) * tokens * width;
    const T* rotations = cos_sin + static_cast<size_t>(b) * tokens * rotary;
#pragma unroll 1
    for (int i = warp; i < own_count * heads; i += warps) {
        const int t = i / heads, h = i % heads, node = first_token + t;
        prepare_head<T>(new_tokens + node * width + (kv_head * group + first_head + h) * size,
                        queries + (t * HEADS + h) * size, q_norm, epsilon, rotations + node * rotary, scale, size, rotary);
    }
#pragma unroll 1
    for (int node = warps - 1 - warp; node < tokens; node += warps) {
        if ((seen_by_any >> node & 1) == 0) continue;
        const float* new_value = new_tokens + node * width + (all_heads + kv_heads + kv_head) * size;
        prepare_head<T>(new_tokens + node * width + (all_heads + kv_head) * size, own_floats, k_norm, epsilon,
                        rotations + node * rotary, 1.f, size, rotary);
        const bool writes = first_head == 0 && node >= first_token && node < first_token + own_count;
#pragma unroll 2
        for (int d = lane; d < size; d += 32) {
            const T key = from_float<T>(own_floats[d]), value = from_float<T>(__ldcg(new_value + d));
            keys[(ring_rows + node) * stride + d] = key, values[(ring_rows + node) * stride + d] = value;
            if (writes) {
                const size_t place = ((static_cast<size_t>(b) * kv_heads + kv_head) * kv_rows + start + node) * size + d;
                k_cache[place] = key, v_cache[place] = value;
            }
        }
        __syncwarp();
    }

    const int row = b * tokens + token, head = kv_head * group + first_head;
    State<PAIRS> state;
    for (int each = least_each; each <= most_each; ++each) {
        int splits_most = 0;
#pragma unroll 1
        for (int i = 0; i < own_count; ++i)
            if (of_token[i].tiles_each == each) splits_most = max(splits_most, of_token[i].active);
        const int iterations = (splits_most + slots - 1) / slots * each;
        if (each > least_each)
#pragma unroll 1
            for (int i = 0; i < KEY_STAGES; ++i) load(i, each);
#pragma unroll 1
        for (int iteration = 0; iteration < iterations; ++iteration) {
            wait_for_copies<KEY_STAGES - 1>();
            __syncthreads();
            const int tile = tile_of(iteration, each, slot), split = iteration / each * slots + slot;
            if (own < own_count && mine.tiles_each == each && tile < mine.tiles) {
                const int index = tile * TILE + lane, count = min(TILE, mine.length - tile * TILE);
                int own_row = ((iteration % KEY_STAGES) * slots + slot) * TILE + lane;
                if (index >= start && lane < count) own_row = ring_rows + place_of_bit(mine.seen, index - start);
                if (iteration % each == 0) state.reset();
                attend<T, PAIRS>(state, keys, values, queries + own * HEADS * size, own_floats, own_row,
                                 min(start - tile * TILE, count), count, heads, size, stride);
                if (iteration % each == each - 1 || tile == mine.tiles - 1) {
#pragma unroll
                    for (int h = 0; h < HEADS; ++h) {
                        if (h >= heads) continue;
                        const size_t result = static_cast<size_t>(row) * all_heads + head + h;
                        float* part = partial + (result * splits + split) * (size + 2);
                        if (lane == 0) __stcg(reinterpret_cast<float2*>(part), make_float2(state.maximum[h], state.total[h]));
#pragma unroll
                        for (int pair = 0; pair < PAIRS; ++pair)
                            if (2 * lane + 64 * pair < size)
                                __stcg(reinterpret_cast<float2*>(part + 2 + 2 * lane + 64 * pair),
                                       make_float2(state.sum[h][pair][0], state.sum[h][pair][1]));
                    }
                }
            }
            __syncthreads();
            load(iteration + KEY_STAGES, each);
        }
        wait_for_copies<0>();
        __syncthreads();
    }

#pragma unroll 1
    for (int i = warp; i < own_count * heads; i += warps) {
        const int t = i / heads, h = i % heads, active = of_token[t].active;
        const size_t result = (static_cast<size_t>(b) * tokens + first_token + t) * all_heads + head + h;
        const float* parts = partial + result * splits * (size + 2);
        float maximum = LOWEST, total = 0.f, sum[PAIRS][2] = {};
#pragma unroll 1
        for (int s = lane; s < active; s += 32) maximum = fmaxf(maximum, __ldcg(parts + s * (size + 2)));
        maximum = warp_max(maximum);
#pragma unroll 8
        for (int s = 0; s < active; ++s) {
            const float* part = parts + s * (size + 2);
            const float2 merged = __ldcg(reinterpret_cast<const float2*>(part));
            const float factor = exp2f(merged.x - maximum);
            total = fmaf(merged.y, factor, total);
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair)
                if (2 * lane + 64 * pair < size) {
                    const float2 value = __ldcg(reinterpret_cast<const float2*>(part + 2 + 2 * lane + 64 * pair));
                    sum[pair][0] = fmaf(factor, value.x, sum[pair][0]);
                    sum[pair][1] = fmaf(factor, value.y, sum[pair][1]);
                }
        }
        const float inverse = 1.f / total;
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair)
            if (2 * lane + 64 * pair < size)
                *reinterpret_cast<unsigned*>(context + result * size + 2 * lane + 64 * pair) =
                    pack<T>(sum[pair][0] * inverse, sum[pair][1] * inverse);
    }
}

}  // namespace tree
}  // namespace decode

#define DECODE_TREE_ATTENTION_KERNEL(NAME, T, PAIRS)                                                                   \
    extern "C" __global__ void __launch_bounds__(512) decode_tree_attention_##PAIRS##_##NAME(                          \
        const float* qkv, const T* q_norm, const T* k_norm, float epsilon, const T* cos_sin, const int* start_index,   \
        const unsigned char* mask, T* k_cache, T* v_cache, T* context, float* partial, float scale, int group,         \
        int size, int rotary, int kv_heads, int kv_rows, int tokens, int mask_keys, int splits, int own_tokens) {      \
        decode::tree::attention<T, PAIRS>(                                                                             \
            qkv, q_norm, k_norm, epsilon, cos_sin, start_index, mask, k_cache, v_cache, context, partial, scale,       \
            group, size, rotary, kv_heads, kv_rows, tokens, mask_keys, splits, own_tokens);                            \
    }

DECODE_TREE_ATTENTION_KERNEL(float16, __half, 1)
DECODE_TREE_ATTENTION_KERNEL(float16, __half, 2)
DECODE_TREE_ATTENTION_KERNEL(float16, __half, 4)
DECODE_TREE_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 1)
DECODE_TREE_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 2)
DECODE_TREE_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 4)
