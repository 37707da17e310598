// Attention of the new tokens of each sequence, one in a decode step, some that form a tree in a verify step: q/k norm
// and rotary embedding, their KV rows written, and softmax attention of their query heads over the committed rows and
// the new tokens that they see, the keys split over blocks (flash-decoding, Dao et al. 2023). The block of a key-value
// head that finishes last merges the splits, in their order.
//
// The keys of a token are counted as if the new ones that it sees stood right behind the committed rows, as they do once
// they are accepted, and how they are split depends on their number alone: a token gets the same bits in every batch, in
// every tree, and in the decode step that comes to it later. In a draft step, whose mask speaks of all rows (the nodes of
// earlier levels stand among them), every row counts as a key, and the mask decides at each.
#include "decode_heads.cuh"

namespace decode {

// PAIRS: head elements of a lane, in twos (head size up to 64 * PAIRS). Grid (splits, key-value heads, tokens of all
// sequences). Block: one warp a query head, at least 4. mask [tokens of all sequences, keys]; null: tokens is 1.
// masks_all: the mask speaks of all rows, not of the new ones alone.
template <typename T, int PAIRS>
__device__ __forceinline__ void attention(
    const float* qkv, const T* q_norm, const T* k_norm, float epsilon, const T* cos_sin, const int* start_index,
    const unsigned char* mask, T* k_cache, T* v_cache, T* context, float* partial, unsigned* counters, float scale,
    int group, int size, int rotary, int kv_rows, int tokens, int mask_keys, bool masks_all) {
    extern __shared__ __align__(16) char shared[];
    const int splits = gridDim.x, kv_heads = gridDim.y, split = blockIdx.x, kv_head = blockIdx.y, row = blockIdx.z;
    const int b = tokens == 1 ? row : row / tokens, first_row = b * tokens, own = row - first_row;
    const int heads = group * kv_heads, warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int stride = size + PADDING;
    T* key_tiles = reinterpret_cast<T*>(shared);              // [KEY_STAGES, TILE, stride]
    T* value_tiles = key_tiles + KEY_STAGES * TILE * stride;  // [KEY_STAGES, TILE, stride]
    float* queries = reinterpret_cast<float*>(value_tiles + KEY_STAGES * TILE * stride);  // [group, size]
    float* new_keys = queries + group * size;                    // [tokens, size]
    float* weights = new_keys + tokens * size;                   // [warps, TILE]
    __shared__ bool last_block;

    launch_next_kernel();
    const int start = min(__ldcg(start_index + b), kv_rows - tokens);
    unsigned seen = 1u << own;  // the new tokens that are keys of this one
    const unsigned char* visible = mask + static_cast<size_t>(row) * mask_keys;
    if (mask != nullptr)
        seen |= __ballot_sync(FULL_WARP, lane < tokens && (masks_all || (start + lane < mask_keys &&
                                                                         __ldcg(visible + start + lane) != 0)));
    const int seen_count = __popc(seen), length = start + seen_count;
    const int tiles = (length + TILE - 1) / TILE, tiles_each = (tiles + splits - 1) / splits;
    const int active = (tiles + tiles_each - 1) / tiles_each;
    const int begin = split * tiles_each, end = min(begin + tiles_each, tiles);
    if (split >= active) {
        wait_for_previous_kernel();
        return;
    }
    T* keys = k_cache + (static_cast<size_t>(b) * kv_heads + kv_head) * kv_rows * size;
    T* values = v_cache + (static_cast<size_t>(b) * kv_heads + kv_head) * kv_rows * size;

    // Rows before `start` were written in earlier steps, so they may be read before the previous kernel is done.
    auto load_tile = [&](int tile) {
        if (tile < end) {
            const int stage = (tile - begin) % KEY_STAGES, rows = min(TILE, start - tile * TILE), chunks = size / 8;
#pragma unroll 2
            for (int i = threadIdx.x; i < rows * chunks; i += blockDim.x) {
                const int key = i / chunks, column = i % chunks * 8;
                const size_t source = static_cast<size_t>(tile * TILE + key) * size + column;
                const int target = (stage * TILE + key) * stride + column;
                copy_async(key_tiles + target, keys + source);
                copy_async(value_tiles + target, values + source);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll 1
    for (int i = 0; i < KEY_STAGES; ++i) load_tile(begin + i);

    wait_for_previous_kernel();
    const int width = (heads + 2 * kv_heads) * size;
    const float* new_tokens = qkv + static_cast<size_t>(first_row) * width;
    const T* rotations = cos_sin + static_cast<size_t>(first_row) * rotary;
    if (warp < group)
        prepare_head<T>(new_tokens + own * width + (kv_head * group + warp) * size, queries + warp * size, q_norm, epsilon,
                        rotations + own * rotary, scale, size, rotary);
    const int new_end = min(seen_count, end * TILE - start);  // of the new keys, those in this block's tiles
#pragma unroll 1
    for (int i = max(0, begin * TILE - start) + warps - 1 - warp; i < new_end; i += warps) {
        const int node = place_of_bit(seen, i);
        prepare_head<T>(new_tokens + node * width + (heads + kv_head) * size, new_keys + i * size, k_norm, epsilon,
                        rotations + node * rotary, 1.f, size, rotary);
    }

    float maximum = LOWEST, total = 0.f, sum[PAIRS][2] = {};
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
        const int stage = (tile - begin) % KEY_STAGES, count = min(TILE, length - tile * TILE), key_index = tile * TILE + lane;
        const bool counts = lane < count && (!masks_all || key_index == start + own ||
                                             (key_index < mask_keys && __ldcg(visible + key_index) != 0));
        asm volatile("cp.async.wait_group %0;" ::"n"(KEY_STAGES - 1) : "memory");
        __syncthreads();
        const int first = max(0, tile * TILE - start), last = min(seen_count, (tile + 1) * TILE - start);
        if (first < last) {
#pragma unroll 1
            for (int i = threadIdx.x; i < (last - first) * size; i += blockDim.x) {
                const int index = first + i / size, d = i % size, node = place_of_bit(seen, index);
                const float* new_value = new_tokens + node * width + (heads + kv_heads + kv_head) * size;
                const T key = from_float<T>(new_keys[index * size + d]), value = from_float<T>(__ldcg(new_value + d));
                const int target = (stage * TILE + (start + index) % TILE) * stride + d;
                key_tiles[target] = key, value_tiles[target] = value;
                if (node == own) {
                    const size_t place = static_cast<size_t>(start + own) * size + d;
                    keys[place] = key, values[place] = value;
                }
            }
            __syncthreads();
        }
        if (warp < group) {
            const T* key_row = key_tiles + (stage * TILE + lane) * stride;
            const float4* query = reinterpret_cast<const float4*>(queries + warp * size);
            float score = LOWEST;
            if (counts) {
                float even = 0.f, odd = 0.f;
#pragma unroll 4
                for (int chunk = 0; chunk < size / 8; ++chunk) {
                    float key[8];
                    unpack8<T>(*reinterpret_cast<const uint4*>(key_row + chunk * 8), key);
                    const float4 low = query[2 * chunk], high = query[2 * chunk + 1];
                    even = fmaf(low.x, key[0], even), odd = fmaf(low.y, key[1], odd);
                    even = fmaf(low.z, key[2], even), odd = fmaf(low.w, key[3], odd);
                    even = fmaf(high.x, key[4], even), odd = fmaf(high.y, key[5], odd);
                    even = fmaf(high.z, key[6], even), odd = fmaf(high.w, key[7], odd);
                }
                score = even + odd;
            }
            const float larger = fmaxf(maximum, warp_max(score));
            const float correction = exp2f(maximum - larger), weight = exp2f(score - larger);
            total = fmaf(total, correction, warp_sum(weight));
            maximum = larger;
            __syncwarp();
            weights[warp * TILE + lane] = weight;
            __syncwarp();
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) sum[pair][0] *= correction, sum[pair][1] *= correction;
            const T* value_row = value_tiles + stage * TILE * stride + 2 * lane;
#pragma unroll 8
            for (int key = 0; key < count; ++key) {
                const float factor = weights[warp * TILE + key];
#pragma unroll
                for (int pair = 0; pair < PAIRS; ++pair)
                    if (2 * lane + 64 * pair < size) {
                        const float2 value =
                            unpack<T>(*reinterpret_cast<const unsigned*>(value_row + key * stride + 64 * pair));
                        sum[pair][0] = fmaf(factor, value.x, sum[pair][0]);
                        sum[pair][1] = fmaf(factor, value.y, sum[pair][1]);
                    }
            }
        }
        __syncthreads();
        load_tile(tile + KEY_STAGES);
    }

    const int head = kv_head * group + warp;
    float* parts = partial + (static_cast<size_t>(row) * heads + head) * splits * (size + 2);
    T* result = context + (static_cast<size_t>(row) * heads + head) * size;
    if (active > 1) {
        if (warp < group) {
            float* part = parts + split * (size + 2);
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair)
                if (2 * lane + 64 * pair < size)
                    __stcg(reinterpret_cast<float2*>(part + 2 + 2 * lane + 64 * pair), make_float2(sum[pair][0], sum[pair][1]));
            if (lane == 0) __stcg(reinterpret_cast<float2*>(part), make_float2(maximum, total));
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0)  // wraps to 0, ready for the next layer
            last_block = atomicInc(counters + row * kv_heads + kv_head, active - 1) == active - 1;
        __syncthreads();
        if (!last_block || warp >= group) return;
        __threadfence();
        maximum = LOWEST;
#pragma unroll 1
        for (int s = lane; s < active; s += 32) maximum = fmaxf(maximum, __ldcg(parts + s * (size + 2)));
        maximum = warp_max(maximum), total = 0.f;
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) sum[pair][0] = 0.f, sum[pair][1] = 0.f;
#pragma unroll 8
        for (int s = 0; s < active; ++s) {
            const float* part = parts + s * (size + 2);
            const float2 state = __ldcg(reinterpret_cast<const float2*>(part));
            const float factor = exp2f(state.x - maximum);
            total = fmaf(state.y, factor, total);
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair)
                if (2 * lane + 64 * pair < size) {
                    const float2 value = __ldcg(reinterpret_cast<const float2*>(part + 2 + 2 * lane + 64 * pair));
                    sum[pair][0] = fmaf(factor, value.x, sum[pair][0]);
                    sum[pair][1] = fmaf(factor, value.y, sum[pair][1]);
                }
        }
    }
    if (warp < group) {
        const float inverse = 1.f / total;
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair)
            if (2 * lane + 64 * pair < size)
                *reinterpret_cast<unsigned*>(result + 2 * lane + 64 * pair) =
                    pack<T>(sum[pair][0] * inverse, sum[pair][1] * inverse);
    }
}

#define DECODE_ATTENTION_KERNEL(NAME, T, PAIRS)                                                                        \
    extern "C" __global__ void __launch_bounds__(512) decode_attention_##PAIRS##_##NAME(                               \
        const float* qkv, const T* q_norm, const T* k_norm, float epsilon, const T* cos_sin, const int* start_index,   \
        const unsigned char* mask, T* k_cache, T* v_cache, T* context, float* partial, unsigned* counters,             \
        float scale, int group, int size, int rotary, int kv_rows, int tokens, int mask_keys, int masks_all) {         \
        decode::attention<T, PAIRS>(qkv, q_norm, k_norm, epsilon, cos_sin, start_index, mask, k_cache, v_cache,        \
                                    context, partial, counters, scale, group, size, rotary, kv_rows, tokens,           \
                                    mask_keys, masks_all != 0);                                                        \
    }

}  // namespace decode

DECODE_ATTENTION_KERNEL(float16, __half, 1)
DECODE_ATTENTION_KERNEL(float16, __half, 2)
DECODE_ATTENTION_KERNEL(float16, __half, 4)
DECODE_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 1)
DECODE_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 2)
DECODE_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 4)
