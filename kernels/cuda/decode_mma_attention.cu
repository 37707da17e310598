// Attention of the new tokens of each sequence, one in a decode step, up to 64 that form a tree in a verify step: q/k norm
// and rotary embedding, their KV rows written, and softmax attention of their query heads over the committed rows and
// the new tokens that they see, on tensor cores (flash-decoding, Dao et al. 2023).
//
// The keys of a token are counted as if the new ones that it sees stood right behind the committed rows, as they do once
// they are accepted. Tiles of 64 keys make spans, four spans a group, and where they begin depends on the number of the
// token's keys alone: a token gets the same bits in every batch, in every tree, and in the decode step that comes to it
// later. In a draft step, whose mask speaks of all rows (the nodes of earlier levels stand among them), every row counts
// as a key, and the mask decides at each.
//
// The 16 rows of an instruction are tokens times the query heads of one key-value head. Where new keys stand, each token
// has keys of its own: those 32 keys are then multiplied once for every token, whose rows alone are kept.
#include "decode_fragments.cuh"

namespace decode {
namespace keys_by_position {

constexpr int KEY_TILE = 64, UNIT = 32;  // keys of a tile, and those that are multiplied together
constexpr int GROUP = 4;                 // spans that are merged by a block
constexpr int MAX_TOKENS = 64;
constexpr int ROWS = 16;

// Of a key that is not seen: minus infinity.
__device__ __forceinline__ float no_score() { return __int_as_float(0xff800000); }

// How the keys of a token are divided: into tiles, and those into spans of `each`, at most 2^span_bits.
__device__ __forceinline__ int tiles_of(int length) { return (length + KEY_TILE - 1) / KEY_TILE; }
__device__ __forceinline__ int each_of(int length, int span_bits) {
    return (tiles_of(length) + (1 << span_bits) - 1) >> span_bits;
}
__device__ __forceinline__ int groups_of(int length, int each) {
    return (tiles_of(length) + GROUP * each - 1) / (GROUP * each);
}

// Elements of a head that are rotated together; of those behind them, neighbours.
__device__ __forceinline__ int2 places_of_pair(int pair, int rotary) {
    return pair < rotary / 2 ? make_int2(pair, pair + rotary / 2) : make_int2(2 * pair, 2 * pair + 1);
}

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

// Merges the parts that groups left of a row, in their order.
template <int PAIRS> __device__ __forceinline__ Part<PAIRS> merge_groups(const float* parts, int count, int size) {
    constexpr int AT_ONCE = 4;
    const int lane = threadIdx.x % 32, distance = size + 4;
    Part<PAIRS> whole;
    clear(whole);
#pragma unroll 1
    for (int i = lane; i < count; i += 32) whole.maximum = fmaxf(whole.maximum, __ldcg(parts + i * distance));
    whole.maximum = warp_max(whole.maximum);
#pragma unroll 1
    for (int first = 0; first < count; first += AT_ONCE) {
        Part<PAIRS> part[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) part[i] = read_part<PAIRS>(parts + (first + i) * distance, first + i < count, size);
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

// What the keys of a span leave of 16 rows. A lane has rows lane / 4 and 8 further, columns 2 (lane % 4) and + 1 of 8.
template <int STEPS> struct Rows {
    float maximum[2], total[4], sum[2 * STEPS][4];

    __device__ void reset() {
        maximum[0] = maximum[1] = LOWEST;
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] = 0.f;
#pragma unroll
        for (int n = 0; n < 2 * STEPS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[n][i] = 0.f;
    }
};

template <typename T>
__device__ __forceinline__ void multiply(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned lower[2] = {a[0], a[1]}, upper[2] = {a[2], a[3]};
    multiply_add(sum, lower, upper, b0, b1, T());
}

template <typename T> struct Ones;
template <> struct Ones<__half> { static constexpr unsigned PAIR = 0x3c003c00u; };
template <> struct Ones<__nv_bfloat16> { static constexpr unsigned PAIR = 0x3f803f80u; };

// STEPS: of 16 head elements (head size up to 16 * STEPS). Grid (groups of spans, key-value heads, sequences times
// token_blocks of row_tiles * tile_tokens tokens). Block: a power of two of warps, at least 4 and row_tiles for each of
// `slots` spans (1, 2 or 4) that are computed at once, `stages` (1 or 2) tiles of each in memory. tile_tokens: those whose
// `group` heads are 16 rows or fewer; group_inverse: 65536 / group, rounded up. mask [tokens of all sequences, keys]; null:
// tokens is 1. masks_all: the mask speaks of all rows, not of the new ones alone. partial [tokens of all sequences, query
// heads, states, size + 4].
template <typename T, int STEPS>
__device__ __forceinline__ void attention(
    const float* qkv, const T* q_norm, const T* k_norm, float epsilon, const T* cos_sin, const int* start_index,
    const unsigned char* mask, T* k_cache, T* v_cache, T* context, float* partial, unsigned* counters, float scale,
    int group, int group_inverse, int tile_tokens, int size, int rotary, int kv_rows, int tokens, int token_blocks,
    int mask_keys, bool masks_all, int span_bits, int states, int slots, int row_tiles, int stages) {
    constexpr int PAIRS = STEPS / 4, AT_ONCE = 4, LANES_OF_ROW = 2 * STEPS;
    extern __shared__ __align__(16) char shared[];
    __shared__ unsigned char nodes[MAX_TOKENS][MAX_TOKENS];  // of each token here: the new tokens that it sees
    __shared__ int lengths[MAX_TOKENS];                      // of each token here: its keys
    __shared__ int4 heads_here[2 * MAX_TOKENS];              // where those come from and go to that are made ready
    __shared__ float factors[2 * MAX_TOKENS];                // of their norms
    __shared__ bool last_block;
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int warp = __shfl_sync(FULL_WARP, static_cast<int>(threadIdx.x / 32), 0);  // known to be the same for a warp
    const int split = blockIdx.x, kv_head = blockIdx.y, kv_heads = gridDim.y, heads = group * kv_heads;
    const int b = blockIdx.z / token_blocks, own_tokens = row_tiles * tile_tokens;
    const int first_token = (blockIdx.z - b * token_blocks) * own_tokens, own_count = min(own_tokens, tokens - first_token);
    const int padded = (size + 15) & ~15, stride = padded + 8, ring = stages * slots * KEY_TILE;
    // Rows of `stride` elements: of the ring, [stages, slots, KEY_TILE] keys and as many values; of the new tokens, keys
    // and values; queries [row_tiles, ROWS]; then [GROUP, row_tiles, ROWS, stride] float of spans, unless all of them are
    // computed at once: these lie in the place of the ring.
    T* rows_here = reinterpret_cast<T*>(shared);
    T* new_keys = rows_here + 2 * ring * stride;
    T* queries = new_keys + 2 * tokens * stride;
    float* spans = slots == GROUP ? reinterpret_cast<float*>(shared)
                                  : reinterpret_cast<float*>(queries + row_tiles * ROWS * stride);

    launch_next_kernel();
    const int start = min(__ldcg(start_index + b), kv_rows - tokens), longest = start + tokens;
    const int least = each_of(masks_all ? longest : start + 1, span_bits), most = each_of(longest, span_bits);
    int blocks = groups_of(longest, most);
    if (least < most) blocks = max(blocks, (1 << span_bits) / GROUP);
    if (split >= blocks) {
        wait_for_previous_kernel();
        return;
    }
    T* cached_keys = k_cache + (static_cast<size_t>(b) * kv_heads + kv_head) * kv_rows * size;
    T* cached_values = v_cache + (static_cast<size_t>(b) * kv_heads + kv_head) * kv_rows * size;

    // Rows before `start` were written in earlier steps, so they may be read before the previous kernel is done. Behind
    // them stand zeros: a weight of 0 must meet the same value wherever a token stands.
    auto load = [&](int first_span, int iteration, int each) {
        const int column = threadIdx.x % LANES_OF_ROW * 8, rows_at_once = blockDim.x / LANES_OF_ROW;
        if (column < padded) {
#pragma unroll 1
            for (int slot = 0; slot < slots; ++slot) {
                const int first_row = ((first_span + slot) * each + iteration) * KEY_TILE;
                if (first_row >= longest) break;
                const int place = ((iteration & (stages - 1)) * slots + slot) * KEY_TILE;
#pragma unroll 1
                for (int row = threadIdx.x / LANES_OF_ROW; row < KEY_TILE; row += rows_at_once) {
                    const bool exists = first_row + row < start && column < size;
                    const size_t source = exists ? static_cast<size_t>(first_row + row) * size + column : 0;
                    const unsigned target = shared_address(rows_here + (place + row) * stride + column);
                    copy_async_16(target, cached_keys + source, exists);
                    copy_async_16(target + ring * stride * sizeof(T), cached_values + source, exists);
                }
            }
        }
        commit_copies();
    };
    load(split * GROUP, 0, least);

    // Columns behind the heads' and rows of no token are zeros.
#pragma unroll 1
    for (int i = threadIdx.x; i < (2 * tokens + row_tiles * ROWS) * stride / 8; i += blockDim.x)
        reinterpret_cast<uint4*>(new_keys)[i] = make_uint4(0u, 0u, 0u, 0u);
#pragma unroll 1
    for (int t = warp; t < own_count; t += warps) {
        const int token = first_token + t;
        const unsigned char* visible = mask + (static_cast<size_t>(b) * tokens + token) * mask_keys + start;
        int count = 0;
#pragma unroll 1
        for (int node = lane; node < (tokens > 32 ? 64 : 32); node += 32) {
            const bool sees = node < tokens && (node == token || masks_all ||
                                                (mask != nullptr && start + node < mask_keys && __ldcg(visible + node) != 0));
            const unsigned bits = __ballot_sync(FULL_WARP, sees);
            if (sees) nodes[t][count + __popc(bits & ((1u << lane) - 1))] = static_cast<unsigned char>(node);
            count += __popc(bits);
        }
        if (lane == 0) lengths[t] = start + count;
    }
    // The token of a row, counted from the block's first; -1: none.
    auto token_of = [&](int row) {
        const int t = row % ROWS * group_inverse >> 16, token = row / ROWS * tile_tokens + t;
        return t < tile_tokens && token < own_count ? token : -1;
    };
    auto head_of = [&](int row) { return row % ROWS - (row % ROWS * group_inverse >> 16) * group; };
    // Where positions are new, the block needs all new keys. The one that has the first of them writes its tokens' rows.
    const int new_count = (split + 1) * GROUP * most * KEY_TILE > start ? tokens : 0;
    const bool writes = start / KEY_TILE / (GROUP * least) == split;
    const int items = new_count + row_tiles * ROWS;
#pragma unroll 1
    for (int item = threadIdx.x; item < items; item += blockDim.x) {
        const bool is_new = item < new_count;
        const int row = item - new_count, t = is_new ? item - first_token : token_of(row), token = b * tokens + first_token + t;
        const int own = is_new ? heads + kv_head : kv_head * group + head_of(row);
        const int source = is_new || t >= 0 ? (token * (heads + 2 * kv_heads) + own) * size : -1;
        const bool caches = is_new && writes && t >= 0 && t < own_count;
        heads_here[item] = make_int4(source, source < 0 ? 0 : token * rotary, (is_new ? item : 2 * tokens + row) * stride,
                                     caches ? (start + item) * size : -1);
    }
    __syncthreads();

    wait_for_previous_kernel();
    if (q_norm != nullptr) {
#pragma unroll 1
        for (int item = warp; item < items; item += warps) {
            const float* source = qkv + max(heads_here[item].x, 0);
            float squares = 0.f;
#pragma unroll 2
            for (int d = lane; d < size; d += 32) {
                const float value = __ldcg(source + d);
                squares = fmaf(value, value, squares);
            }
            squares = warp_sum(squares);
            if (lane == 0) factors[item] = rsqrtf(squares / size + epsilon);
        }
        __syncthreads();
    }
#pragma unroll 1
    for (int pair = lane; pair < size / 2; pair += 32) {
        const int2 place = places_of_pair(pair, rotary);
        const bool rotates = pair < rotary / 2;
#pragma unroll 1
        for (int first = warp; first < items; first += warps * AT_ONCE) {
            float low[AT_ONCE], high[AT_ONCE], cosine[AT_ONCE], sine[AT_ONCE];
            float2 value[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int item = first + i * warps;
                const int4 own = heads_here[min(item, items - 1)];
                const float* source = qkv + max(own.x, 0);
                const T* rotation = cos_sin + own.y + (rotates ? pair : 0);
                low[i] = __ldcg(source + place.x), high[i] = __ldcg(source + place.y);
                cosine[i] = to_float(__ldcg(rotation)), sine[i] = to_float(__ldcg(rotation + rotary / 2));
                if (item < new_count)
                    value[i] = __ldcg(reinterpret_cast<const float2*>(source + kv_heads * size + 2 * pair));
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int item = first + i * warps;
                const int4 own = heads_here[min(item, items - 1)];
                if (item >= items || own.x < 0) continue;
                if (q_norm != nullptr) {
                    const T* norm = item < new_count ? k_norm : q_norm;
                    low[i] = low[i] * factors[item] * to_float(norm[place.x]);
                    high[i] = high[i] * factors[item] * to_float(norm[place.y]);
                }
                const T first_half = from_float<T>(rotates ? fmaf(low[i], cosine[i], -high[i] * sine[i]) : low[i]);
                const T second_half = from_float<T>(rotates ? fmaf(high[i], cosine[i], low[i] * sine[i]) : high[i]);
                T* target = new_keys + own.z;
                target[place.x] = first_half, target[place.y] = second_half;
                if (item >= new_count) continue;
                const unsigned both = pack<T>(value[i].x, value[i].y);
                *reinterpret_cast<unsigned*>(target + tokens * stride + 2 * pair) = both;
                if (own.w < 0) continue;
                cached_keys[own.w + place.x] = first_half, cached_keys[own.w + place.y] = second_half;
                *reinterpret_cast<unsigned*>(cached_values + own.w + 2 * pair) = both;
            }
        }
    }
    __syncthreads();

    // This warp's rows, and the two of this lane.
    const int slot = warp & (slots - 1), tile_of_rows = warp / slots, first_own = tile_of_rows * tile_tokens;
    const int end_own = min(first_own + tile_tokens, own_count);
    const bool computes = tile_of_rows < row_tiles && first_own < end_own;
    const bool upper = end_own - first_own > (8 * group_inverse >> 16);  // whether there are rows from 8 on
    const int first_row = tile_of_rows * ROWS + lane / 4;
    int own[2] = {-1, -1}, length[2] = {0, 0}, longest_here = 0;
    if (computes) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            own[half] = token_of(first_row + 8 * half);
            if (own[half] >= 0) length[half] = lengths[own[half]];
        }
#pragma unroll 1
        for (int t = first_own; t < end_own; ++t) longest_here = max(longest_here, lengths[t]);
    }
    // Lane i reads row i % 16 of 16, columns of its lower half for i < 16.
    const unsigned row_base = shared_address(rows_here) + lane / 16 * 16;
    const unsigned query_base = shared_address(queries + (tile_of_rows * ROWS + lane % 16) * stride) + lane / 16 * 16;
    constexpr bool KEEPS_QUERIES = STEPS <= 8;
    unsigned query[KEEPS_QUERIES ? STEPS : 1][4];
    if (KEEPS_QUERIES && computes) {
#pragma unroll
        for (int k = 0; k < (KEEPS_QUERIES ? STEPS : 1); ++k)
            if (16 * k < size) load_matrices(query[k], query_base + 32 * k);
    }

    Rows<STEPS> rows;
#pragma unroll 1
    for (int each = least; each <= most; ++each) {
#pragma unroll 1
        for (int first_span = 0; first_span < GROUP; first_span += slots) {
            int loaded = each == least && first_span == 0;  // iterations whose tiles are here or come
            rows.reset();
#pragma unroll 1
            for (int iteration = 0; iteration < each; ++iteration) {
#pragma unroll 1
                for (; loaded < min(iteration + stages, each); ++loaded) load(split * GROUP + first_span, loaded, each);
                if (loaded > iteration + 1) wait_for_copies<1>();
                else wait_for_copies<0>();
                __syncthreads();
                const int begin = ((split * GROUP + first_span + slot) * each + iteration) * KEY_TILE;
                if (begin < longest_here) {
                    const int ring_row = ((iteration & (stages - 1)) * slots + slot) * KEY_TILE + lane % 16;
                    const bool together = masks_all || begin + KEY_TILE <= start;
                    // The rows of 16 keys of token t: a lane names one of them.
                    auto key_row = [&](int t, int block) {
                        const int position = begin + 16 * block + lane % 16;
                        return position < start || position >= lengths[t] ? ring_row + 16 * block
                                                                          : 2 * ring + nodes[t][position - start];
                    };
                    float score[8][4];
#pragma unroll
                    for (int unit = 0; unit < 2; ++unit) {
                        const int first = begin + UNIT * unit;
                        const bool shares = together || first + UNIT <= start;
#pragma unroll
                        for (int n = 4 * unit; n < 4 * unit + 4; ++n)
#pragma unroll
                            for (int i = 0; i < 4; ++i) score[n][i] = 0.f;
#pragma unroll 1
                        for (int t = first_own; t < end_own; ++t) {
                            if (first < lengths[t]) {
                                const unsigned low = row_base + key_row(t, 2 * unit) * stride * sizeof(T);
                                const unsigned high = row_base + key_row(t, 2 * unit + 1) * stride * sizeof(T);
                                float sum[4][4] = {};
#pragma unroll
                                for (int k = 0; k < STEPS; ++k) {
                                    if (16 * k >= size) continue;
                                    unsigned key[2][4];
                                    load_matrices(key[0], low + 32 * k);
                                    load_matrices(key[1], high + 32 * k);
                                    unsigned part[4];
                                    if (!KEEPS_QUERIES) load_matrices(part, query_base + 32 * k);
#pragma unroll
                                    for (int n = 0; n < 4; ++n)
                                        multiply<T>(sum[n], KEEPS_QUERIES ? query[KEEPS_QUERIES ? k : 0] : part,
                                                    key[n / 2][n % 2], key[n / 2][n % 2 + 2]);
                                }
#pragma unroll
                                for (int n = 0; n < 4; ++n)
#pragma unroll
                                    for (int i = 0; i < 4; ++i)
                                        if (shares || own[i / 2] == t) score[4 * unit + n][i] = sum[n][i];
                            }
                            if (shares) break;
                        }
                    }
                    if (masks_all || !together) {
                        const int column = 2 * (lane % 4);
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const int count = length[half] - begin - column;
#pragma unroll
                            for (int n = 0; n < 8; ++n)
#pragma unroll
                                for (int i = 0; i < 2; ++i)
                                    if (8 * n + i >= count) score[n][2 * half + i] = no_score();
                        }
                    }
                    if (masks_all) {
                        unsigned sees[2][2] = {};
#pragma unroll 1
                        for (int t = first_own; t < end_own; ++t) {
                            const int token = first_token + t;
                            const unsigned char* seen = mask + (static_cast<size_t>(b) * tokens + token) * mask_keys;
#pragma unroll
                            for (int i = 0; i < 2; ++i) {
                                const int key = begin + lane + 32 * i;
                                const unsigned bits = __ballot_sync(
                                    FULL_WARP, key == start + token || (key < mask_keys && __ldcg(seen + key) != 0));
#pragma unroll
                                for (int half = 0; half < 2; ++half)
                                    if (own[half] == t) sees[half][i] = bits >> 2 * (lane % 4);
                            }
                        }
#pragma unroll
                        for (int half = 0; half < 2; ++half)
#pragma unroll
                            for (int n = 0; n < 8; ++n)
#pragma unroll
                                for (int i = 0; i < 2; ++i)
                                    if ((sees[half][n / 4] >> (8 * (n % 4) + i) & 1) == 0) score[n][2 * half + i] = no_score();
                    }
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        if (half == 1 && !upper) continue;
                        float largest = no_score();
#pragma unroll
                        for (int n = 0; n < 8; ++n)
                            largest = fmaxf(largest, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
                        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
                        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
                        const float maximum = fmaxf(rows.maximum[half], largest * scale);
                        if (iteration > 0) {
                            const float correction = power_of_two(rows.maximum[half] - maximum);
                            rows.total[2 * half] *= correction;
#pragma unroll
                            for (int n = 0; n < 2 * STEPS; ++n)
                                rows.sum[n][2 * half] *= correction, rows.sum[n][2 * half + 1] *= correction;
                        }
                        rows.maximum[half] = maximum;
#pragma unroll
                        for (int n = 0; n < 8; ++n)
#pragma unroll
                            for (int i = 2 * half; i < 2 * half + 2; ++i)
                                score[n][i] = power_of_two(fmaf(score[n][i], scale, -maximum));
                    }
#pragma unroll
                    for (int unit = 0; unit < 2; ++unit) {
                        const int first = begin + UNIT * unit;
                        const bool shares = together || first + UNIT <= start;
                        unsigned weight[2][4];
#pragma unroll
                        for (int block = 0; block < 2; ++block) {
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                const float* pair = &score[4 * unit + 2 * block + i / 2][2 * (i % 2)];
                                weight[block][i] = pack<T>(pair[0], pair[1]);
                            }
                            multiply<T>(rows.total, weight[block], Ones<T>::PAIR, Ones<T>::PAIR);
                        }
#pragma unroll 1
                        for (int t = first_own; t < end_own; ++t) {
                            if (first < lengths[t]) {
                                unsigned place[2];
#pragma unroll
                                for (int block = 0; block < 2; ++block) {
                                    const int row = key_row(t, 2 * unit + block);
                                    place[block] = row_base + (row + (row < ring ? ring : tokens)) * stride * sizeof(T);
                                }
#pragma unroll
                                for (int d = 0; d < STEPS; ++d) {
                                    if (16 * d >= size) continue;
                                    unsigned value[2][4];
                                    load_transposed_matrices(value[0], place[0] + 32 * d);
                                    load_transposed_matrices(value[1], place[1] + 32 * d);
#pragma unroll
                                    for (int n = 0; n < 2; ++n) {
                                        float sum[4];
#pragma unroll
                                        for (int i = 0; i < 4; ++i) sum[i] = rows.sum[2 * d + n][i];
                                        multiply<T>(sum, weight[0], value[0][2 * n], value[0][2 * n + 1]);
                                        multiply<T>(sum, weight[1], value[1][2 * n], value[1][2 * n + 1]);
#pragma unroll
                                        for (int i = 0; i < 4; ++i)
                                            if (shares || own[i / 2] == t) rows.sum[2 * d + n][i] = sum[i];
                                    }
                                }
                            }
                            if (shares) break;
                        }
                    }
                }
                __syncthreads();
            }
            if (computes) {
                float* part = spans + ((first_span + slot) * row_tiles * ROWS + first_row) * stride + 2 * (lane % 4);
#pragma unroll
                for (int half = 0; half < 2; ++half, part += 8 * stride) {
                    if (lane % 4 == 0)
                        *reinterpret_cast<float2*>(part + padded) = make_float2(rows.maximum[half], rows.total[2 * half]);
#pragma unroll
                    for (int n = 0; n < 2 * STEPS; ++n)
                        if (8 * n < size)
                            *reinterpret_cast<float2*>(part + 8 * n) = make_float2(rows.sum[n][2 * half], rows.sum[n][2 * half + 1]);
                }
            }
            __syncthreads();
        }
#pragma unroll 1
        for (int row = warp; row < row_tiles * ROWS; row += warps) {
            const int t = token_of(row);
            if (t < 0 || each_of(lengths[t], span_bits) != each || split >= groups_of(lengths[t], each)) continue;
            Part<PAIRS> part[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                const float* span = spans + (i * row_tiles * ROWS + row) * stride;
                part[i].maximum = span[padded], part[i].total = span[padded + 1];
#pragma unroll
                for (int p = 0; p < PAIRS; ++p) {
                    const int column = 2 * lane + 64 * p;
                    const float2 sum = column < size ? *reinterpret_cast<const float2*>(span + column) : make_float2(0.f, 0.f);
                    part[i].sum[p][0] = sum.x, part[i].sum[p][1] = sum.y;
                }
            }
            const Part<PAIRS> merged = merge_group(part);
            const size_t result = (static_cast<size_t>(b) * tokens + first_token + t) * heads + kv_head * group + head_of(row);
            if (blocks == 1) {
                write_row(context + result * size, merged, size);
                continue;
            }
            float* target = partial + (result * states + split) * (size + 4);
            if (lane == 0) __stcg(reinterpret_cast<float2*>(target), make_float2(merged.maximum, merged.total));
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) {
                const int column = 2 * lane + 64 * p;
                if (column < size)
                    __stcg(reinterpret_cast<float2*>(target + 4 + column), make_float2(merged.sum[p][0], merged.sum[p][1]));
            }
        }
        __syncthreads();
    }
    if (blocks == 1) return;

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)  // wraps to 0, ready for the next layer
        last_block = atomicInc(counters + blockIdx.z * kv_heads + kv_head, blocks - 1) == blocks - 1;
    __syncthreads();
    if (!last_block) return;
    __threadfence();
#pragma unroll 1
    for (int row = warp; row < row_tiles * ROWS; row += warps) {
        const int t = token_of(row);
        if (t < 0) continue;
        const size_t result = (static_cast<size_t>(b) * tokens + first_token + t) * heads + kv_head * group + head_of(row);
        const int count = groups_of(lengths[t], each_of(lengths[t], span_bits));
        write_row(context + result * size, merge_groups<PAIRS>(partial + result * states * (size + 4), count, size), size);
    }
}

}  // namespace keys_by_position
}  // namespace decode

#define DECODE_MMA_ATTENTION_KERNEL(NAME, T, STEPS, THREADS)                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) decode_mma_attention_##STEPS##_##NAME(                       \
        const float* qkv, const T* q_norm, const T* k_norm, float epsilon, const T* cos_sin, const int* start_index,   \
        const unsigned char* mask, T* k_cache, T* v_cache, T* context, float* partial, unsigned* counters,             \
        float scale, int group, int group_inverse, int tile_tokens, int size, int rotary, int kv_rows, int tokens,     \
        int token_blocks, int mask_keys, int masks_all, int span_bits, int states, int slots, int row_tiles,           \
        int stages) {                                                                                                  \
        decode::keys_by_position::attention<T, STEPS>(                                                                 \
            qkv, q_norm, k_norm, epsilon, cos_sin, start_index, mask, k_cache, v_cache, context, partial, counters,    \
            scale, group, group_inverse, tile_tokens, size, rotary, kv_rows, tokens, token_blocks, mask_keys,          \
            masks_all != 0, span_bits, states, slots, row_tiles, stages);                                              \
    }

DECODE_MMA_ATTENTION_KERNEL(float16, __half, 4, 512)
DECODE_MMA_ATTENTION_KERNEL(float16, __half, 8, 256)
DECODE_MMA_ATTENTION_KERNEL(float16, __half, 16, 256)
DECODE_MMA_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 4, 512)
DECODE_MMA_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 8, 256)
DECODE_MMA_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 16, 256)
