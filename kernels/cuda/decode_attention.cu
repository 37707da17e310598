// Attention of the decode step: q/k norm and rotary embedding of the new token, its KV row written, and softmax
// attention of its query heads over all rows, the rows split over blocks (flash-decoding, Dao et al. 2023). The block
// of a key-value head that finishes last merges the splits, in their order. How rows are split depends on the length
// alone: a sequence gets the same bits in every batch.
#include "decode_common.cuh"

namespace decode {

constexpr int TILE = 32;  // keys, one a lane
constexpr int STAGES = 2;
constexpr int PADDING = 8;  // elements between rows in shared memory, against bank conflicts

__device__ __forceinline__ void copy_async(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
                 "l"(global)
                 : "memory");
}

// One head of the new token by one warp: [norm,] rotation, scale; source is float in memory, target float in shared.
template <typename T>
__device__ __forceinline__ void prepare_head(
    const float* source, float* target, const T* norm_weight, float epsilon, const T* cos_sin, float scale, int size,
    int rotary) {
    const int lane = threadIdx.x % 32, half = rotary / 2;
    float squares = 0.f;
    for (int d = lane; d < size; d += 32) {
        const float value = __ldcg(source + d);
        squares = fmaf(value, value, squares);
        target[d] = value;
    }
    if (norm_weight != nullptr) {
        const float factor = rsqrtf(warp_sum(squares) / size + epsilon);
        for (int d = lane; d < size; d += 32) target[d] = target[d] * factor * to_float(norm_weight[d]);
    }
    __syncwarp();
    for (int d = lane; d < half; d += 32) {
        const float cosine = to_float(cos_sin[d]), sine = to_float(cos_sin[half + d]);
        const float low = target[d], high = target[half + d];
        target[d] = fmaf(low, cosine, -high * sine) * scale;
        target[half + d] = fmaf(high, cosine, low * sine) * scale;
    }
    for (int d = rotary + lane; d < size; d += 32) target[d] *= scale;
    __syncwarp();
}

// PAIRS: head elements of a lane, in twos (head size up to 64 * PAIRS). Block: one warp a query head, at least 4.
template <typename T, int PAIRS>
__device__ __forceinline__ void attention(
    const float* qkv, const T* q_norm, const T* k_norm, float epsilon, const T* cos_sin, const int* start_index,
    T* k_cache, T* v_cache, T* context, float* partial, unsigned* counters, float scale, int group, int size, int rotary,
    int kv_rows) {
    extern __shared__ __align__(16) char shared[];
    const int splits = gridDim.x, kv_heads = gridDim.y, split = blockIdx.x, kv_head = blockIdx.y, b = blockIdx.z;
    const int heads = group * kv_heads, warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int stride = size + PADDING;
    T* key_tiles = reinterpret_cast<T*>(shared);                 // [STAGES, TILE, stride]
    T* value_tiles = key_tiles + STAGES * TILE * stride;         // [STAGES, TILE, stride]
    float* queries = reinterpret_cast<float*>(value_tiles + STAGES * TILE * stride);  // [group, size]
    float* new_key = queries + group * size;                     // [size]
    float* weights = new_key + size;                             // [warps, TILE]
    __shared__ bool last_block;

    launch_next_kernel();
    const int position = min(start_index[b], kv_rows - 1), length = position + 1;
    const int tiles = (length + TILE - 1) / TILE, tiles_each = (tiles + splits - 1) / splits;
    const int active = (tiles + tiles_each - 1) / tiles_each;
    const int begin = split * tiles_each, end = min(begin + tiles_each, tiles);
    if (split >= active) {
        wait_for_previous_kernel();
        return;
    }
    T* keys = k_cache + (static_cast<size_t>(b) * kv_heads + kv_head) * kv_rows * size;
    T* values = v_cache + (static_cast<size_t>(b) * kv_heads + kv_head) * kv_rows * size;

    // Rows before `position` were written in earlier steps, so they may be read before the previous kernel is done.
    auto load_tile = [&](int tile) {
        if (tile < end) {
            const int stage = (tile - begin) % STAGES, rows = min(TILE, position - tile * TILE), chunks = size / 8;
            for (int i = threadIdx.x; i < rows * chunks; i += blockDim.x) {
                const int row = i / chunks, column = i % chunks * 8;
                const size_t source = static_cast<size_t>(tile * TILE + row) * size + column;
                const int target = (stage * TILE + row) * stride + column;
                copy_async(key_tiles + target, keys + source);
                copy_async(value_tiles + target, values + source);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll
    for (int i = 0; i < STAGES; ++i) load_tile(begin + i);

    wait_for_previous_kernel();
    const float* token = qkv + static_cast<size_t>(b) * (heads + 2 * kv_heads) * size;
    const T* rotation = cos_sin + static_cast<size_t>(b) * rotary;
    if (warp < group)
        prepare_head<T>(token + (kv_head * group + warp) * size, queries + warp * size, q_norm, epsilon, rotation, scale,
                        size, rotary);
    if (end == tiles && warp == warps - 1)
        prepare_head<T>(token + (heads + kv_head) * size, new_key, k_norm, epsilon, rotation, 1.f, size, rotary);

    float maximum = LOWEST, total = 0.f, sum[PAIRS][2] = {};
    for (int tile = begin; tile < end; ++tile) {
        const int stage = (tile - begin) % STAGES, count = min(TILE, length - tile * TILE);
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
        __syncthreads();
        if (tile == tiles - 1) {
            const float* new_value = token + (heads + kv_heads + kv_head) * size;
            const int target = (stage * TILE + position % TILE) * stride;
            for (int d = threadIdx.x; d < size; d += blockDim.x) {
                const T key = from_float<T>(new_key[d]), value = from_float<T>(__ldcg(new_value + d));
                key_tiles[target + d] = key, keys[static_cast<size_t>(position) * size + d] = key;
                value_tiles[target + d] = value, values[static_cast<size_t>(position) * size + d] = value;
            }
            __syncthreads();
        }
        if (warp < group) {
            const T* key_row = key_tiles + (stage * TILE + lane) * stride;
            const float4* query = reinterpret_cast<const float4*>(queries + warp * size);
            float score = LOWEST;
            if (lane < count) {
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
        load_tile(tile + STAGES);
    }

    const int head = kv_head * group + warp;
    float* parts = partial + (static_cast<size_t>(b) * heads + head) * splits * (size + 2);
    T* result = context + (static_cast<size_t>(b) * heads + head) * size;
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
            last_block = atomicInc(counters + b * kv_heads + kv_head, active - 1) == active - 1;
        __syncthreads();
        if (!last_block || warp >= group) return;
        __threadfence();
        maximum = LOWEST;
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
        T* k_cache, T* v_cache, T* context, float* partial, unsigned* counters, float scale, int group, int size,      \
        int rotary, int kv_rows) {                                                                                     \
        decode::attention<T, PAIRS>(qkv, q_norm, k_norm, epsilon, cos_sin, start_index, k_cache, v_cache, context,     \
                                    partial, counters, scale, group, size, rotary, kv_rows);                           \
    }

}  // namespace decode

DECODE_ATTENTION_KERNEL(float16, __half, 1)
DECODE_ATTENTION_KERNEL(float16, __half, 2)
DECODE_ATTENTION_KERNEL(float16, __half, 4)
DECODE_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 1)
DECODE_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 2)
DECODE_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 4)
