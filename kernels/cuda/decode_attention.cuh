// Attention of the decode step: q/k norm and rotary embedding of the new token, its KV row written, and softmax
// attention of its query heads over all rows, the rows split over blocks (flash-decoding, Dao et al. 2023). The block
// of a key-value head that finishes last merges the splits, in their order. How rows are split depends on the length
// alone: a sequence gets the same bits in every batch.
#pragma once
#include "decode_arguments.cuh"
#include "decode_common.cuh"

namespace decode {

constexpr int TILE = 32;    // keys that a warp takes at a time, one a lane
constexpr int PADDING = 8;  // elements between rows in shared memory, against bank conflicts
constexpr int PAIRS = 4;    // head elements of a lane, in twos: head sizes up to 256

// Tiles that a block takes at a time: as many as its warps can share among the query heads, within shared memory.
__device__ __forceinline__ int tiles_at_once(int group, int size) { return max(1, min(WARPS / group, 256 / size)); }

// A split's tiles of one key-value head of one sequence.
struct Split {
    int b, kv_head, index, position, tiles, begin, end, active;

    template <typename T> __device__ Split(const Arguments<T>& arguments, int item) {
        index = item % arguments.splits;
        kv_head = item / arguments.splits % arguments.kv_heads;
        b = item / (arguments.splits * arguments.kv_heads);
        position = min(arguments.start_index[b], arguments.kv_rows - 1);
        tiles = position / TILE + 1;
        const int each = (tiles + arguments.splits - 1) / arguments.splits;
        active = (tiles + each - 1) / each;
        begin = index * each, end = min(begin + each, tiles);
    }
};

// One head of the new token by one warp: norm if any, rotation, scale; `target` is in shared memory.
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

// What softmax attention over some of the keys has come to, one head a warp.
struct Online {
    float maximum, total, sum[PAIRS][2];

    __device__ void clear() {
        maximum = LOWEST, total = 0.f;
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) sum[pair][0] = sum[pair][1] = 0.f;
    }
    __device__ void store(float* part, int size) const {
        const int lane = threadIdx.x % 32;
        if (lane == 0) *reinterpret_cast<float2*>(part) = make_float2(maximum, total);
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair)
            if (2 * lane + 64 * pair < size)
                *reinterpret_cast<float2*>(part + 2 + 2 * lane + 64 * pair) = make_float2(sum[pair][0], sum[pair][1]);
    }
    // This becomes the merger of `count` parts, in their order; read through the second-level cache where GLOBAL.
    template <bool GLOBAL> __device__ void merge(const float* parts, int stride, int count, int size) {
        const int lane = threadIdx.x % 32;
        clear();
        for (int i = lane; i < count; i += 32) maximum = fmaxf(maximum, load<GLOBAL>(parts + i * stride).x);
        maximum = warp_max(maximum);
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
            const float* part = parts + i * stride;
            const float2 state = load<GLOBAL>(part);
            const float factor = exp2f(state.x - maximum);
            total = fmaf(state.y, factor, total);
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair)
                if (2 * lane + 64 * pair < size) {
                    const float2 value = load<GLOBAL>(part + 2 + 2 * lane + 64 * pair);
                    sum[pair][0] = fmaf(factor, value.x, sum[pair][0]);
                    sum[pair][1] = fmaf(factor, value.y, sum[pair][1]);
                }
        }
    }
    template <bool GLOBAL> __device__ static float2 load(const float* pointer) {
        const float2* pair = reinterpret_cast<const float2*>(pointer);
        return GLOBAL ? __ldcg(pair) : *pair;
    }
    // Take in `count` keys and values of a tile; the query is scaled so that scores are powers of two.
    template <typename T>
    __device__ void attend(const float* query, const T* keys, const T* values, float* weights, int count, int size) {
        const int lane = threadIdx.x % 32, stride = size + PADDING;
        float score = LOWEST;
        if (lane < count) {
            float even = 0.f, odd = 0.f;
#pragma unroll 4
            for (int chunk = 0; chunk < size / 8; ++chunk) {
                float key[8];
                unpack8<T>(*reinterpret_cast<const uint4*>(keys + lane * stride + chunk * 8), key);
                const float4 low = *reinterpret_cast<const float4*>(query + chunk * 8);
                const float4 high = *reinterpret_cast<const float4*>(query + chunk * 8 + 4);
                even = fmaf(low.x, key[0], even), odd = fmaf(low.y, key[1], odd);
                even = fmaf(low.z, key[2], even), odd = fmaf(low.w, key[3], odd);
                even = fmaf(high.x, key[4], even), odd = fmaf(high.y, key[5], odd);
                even = fmaf(high.z, key[6], even), odd = fmaf(high.w, key[7], odd);
            }
            score = even + odd;
        }
        const float larger = fmaxf(maximum, warp_max(score));
        const float correction = exp2f(maximum - larger), weight = lane < count ? exp2f(score - larger) : 0.f;
        total = fmaf(total, correction, warp_sum(weight));
        maximum = larger;
        __syncwarp();
        weights[lane] = weight;
        __syncwarp();
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) sum[pair][0] *= correction, sum[pair][1] *= correction;
#pragma unroll 8
        for (int key = 0; key < count; ++key) {
            const float factor = weights[key];
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair)
                if (2 * lane + 64 * pair < size) {
                    const float2 value =
                        unpack<T>(*reinterpret_cast<const unsigned*>(values + key * stride + 2 * lane + 64 * pair));
                    sum[pair][0] = fmaf(factor, value.x, sum[pair][0]);
                    sum[pair][1] = fmaf(factor, value.y, sum[pair][1]);
                }
        }
    }
};

// Bring the block's old KV rows near, before it waits for the new token's q, k and v.
template <typename T> __device__ __forceinline__ void prefetch_kv(const Arguments<T>& arguments, const Layer<T>& layer) {
    const int items = arguments.batch * arguments.kv_heads * arguments.splits, size = arguments.head_size;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const Split split(arguments, item);
        const size_t head = (static_cast<size_t>(split.b) * arguments.kv_heads + split.kv_head) * arguments.kv_rows;
        const int rows = min(split.end * TILE, split.position) - split.begin * TILE;
        const size_t start = (head + split.begin * TILE) * size;
        for (int offset = threadIdx.x * (128 / static_cast<int>(sizeof(T))); offset < rows * size;
             offset += THREADS * (128 / static_cast<int>(sizeof(T)))) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(layer.k_cache + start + offset));
            asm volatile("prefetch.global.L2 [%0];" ::"l"(layer.v_cache + start + offset));
        }
    }
}

template <typename T>
__device__ __forceinline__ void attend_split(
    const Arguments<T>& arguments, const Layer<T>& layer, const Split& split, char* shared) {
    const int size = arguments.head_size, stride = size + PADDING, group = arguments.heads / arguments.kv_heads;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = warp % group, share = warp / group;
    const int at_once = tiles_at_once(group, size);
    T* key_tiles = reinterpret_cast<T*>(shared);                                    // [at_once * TILE, stride]
    T* value_tiles = key_tiles + at_once * TILE * stride;                           // [at_once * TILE, stride]
    float* queries = reinterpret_cast<float*>(value_tiles + at_once * TILE * stride);  // [group, size]
    float* new_key = queries + group * size;                                        // [size]
    float* weights = new_key + size;                                                // [WARPS, TILE]
    float* parts = weights + WARPS * TILE;                                          // [group, at_once, size + 2]
    __shared__ bool last_block;

    const size_t cache = (static_cast<size_t>(split.b) * arguments.kv_heads + split.kv_head) * arguments.kv_rows * size;
    T *keys = layer.k_cache + cache, *values = layer.v_cache + cache;
    const float* token = arguments.qkv + static_cast<size_t>(split.b) * (arguments.heads + 2 * arguments.kv_heads) * size;
    const T* rotation = arguments.cos_sin + static_cast<size_t>(split.b) * arguments.rotary;
    const bool owns_new = split.end == split.tiles;
    if (warp < group)
        prepare_head<T>(token + (split.kv_head * group + warp) * size, queries + warp * size, layer.q_norm,
                        arguments.epsilon, rotation, arguments.scale, size, arguments.rotary);
    if (owns_new && warp == WARPS - 1)
        prepare_head<T>(token + (arguments.heads + split.kv_head) * size, new_key, layer.k_norm, arguments.epsilon,
                        rotation, 1.f, size, arguments.rotary);

    Online online;
    online.clear();
    for (int first = split.begin; first < split.end; first += at_once) {
        __syncthreads();
        const int tiles = min(at_once, split.end - first), chunks = size / 8;
        const int old_rows = min(tiles * TILE, split.position - first * TILE);
#pragma unroll 4
        for (int i = threadIdx.x; i < old_rows * chunks; i += THREADS) {
            const int row = i / chunks, column = i % chunks * 8;
            const size_t source = static_cast<size_t>(first * TILE + row) * size + column;
            const uint4 key = __ldcg(reinterpret_cast<const uint4*>(keys + source));
            const uint4 value = __ldcg(reinterpret_cast<const uint4*>(values + source));
            *reinterpret_cast<uint4*>(key_tiles + row * stride + column) = key;
            *reinterpret_cast<uint4*>(value_tiles + row * stride + column) = value;
        }
        if (owns_new && first + tiles == split.tiles) {
            const float* new_value = token + (arguments.heads + arguments.kv_heads + split.kv_head) * size;
            __syncthreads();  // the new key is there
            for (int d = threadIdx.x; d < size; d += THREADS) {
                const T key = from_float<T>(new_key[d]), value = from_float<T>(__ldcg(new_value + d));
                key_tiles[old_rows * stride + d] = key, value_tiles[old_rows * stride + d] = value;
                keys[static_cast<size_t>(split.position) * size + d] = key;
                values[static_cast<size_t>(split.position) * size + d] = value;
            }
        }
        __syncthreads();
        if (share < tiles)
            online.attend<T>(queries + head * size, key_tiles + share * TILE * stride, value_tiles + share * TILE * stride,
                             weights + warp * TILE, min(TILE, split.position + 1 - (first + share) * TILE), size);
    }
    const int part_size = size + 2;
    if (share < at_once) online.store(parts + (head * at_once + share) * part_size, size);
    __syncthreads();
    // A share that had no tile has the lowest maximum and a total of 0: it adds nothing.
    if (warp < group) online.merge<false>(parts + warp * at_once * part_size, part_size, at_once, size);

    const size_t output = static_cast<size_t>(split.b) * arguments.heads + split.kv_head * group + warp;
    float* others = arguments.partial + output * arguments.splits * part_size;
    if (split.active > 1) {
        if (warp < group) online.store(others + split.index * part_size, size);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0)  // wraps to 0, ready for the next layer
            last_block = atomicInc(arguments.counters + split.b * arguments.kv_heads + split.kv_head, split.active - 1) ==
                         split.active - 1;
        __syncthreads();
        if (!last_block) return;
        __threadfence();
        if (warp < group) online.merge<true>(others, part_size, split.active, size);
    }
    if (warp < group) {
        T* result = arguments.context + output * size;
        const float inverse = 1.f / online.total;
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair)
            if (2 * lane + 64 * pair < size)
                *reinterpret_cast<unsigned*>(result + 2 * lane + 64 * pair) =
                    pack<T>(online.sum[pair][0] * inverse, online.sum[pair][1] * inverse);
    }
}

template <typename T>
__device__ __forceinline__ void attention(const Arguments<T>& arguments, const Layer<T>& layer, char* shared) {
    const int items = arguments.batch * arguments.kv_heads * arguments.splits;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const Split split(arguments, item);
        if (split.index < split.active) attend_split(arguments, layer, split, shared);
        __syncthreads();
    }
}

}  // namespace decode
