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
// The 16 rows of an instruction are tokens times the query heads of one key-value head. Four warps, a team, compute a tile
// for them: each the scores of 16 keys, then a quarter of the head. Where new keys stand, each token has keys of its own:
// those 16 are then multiplied once for every token, whose rows alone are kept.
#include "decode_fragments.cuh"

namespace decode {
namespace keys_by_position {

constexpr int KEY_TILE = 64, BLOCK = 16;  // keys of a tile, and of a step of the instruction
constexpr int TEAM = KEY_TILE / BLOCK;
constexpr int GROUP = 4;  // spans that are merged by a block
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

template <typename T>
__device__ __forceinline__ void multiply(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned lower[2] = {a[0], a[1]}, upper[2] = {a[2], a[3]};
    multiply_add(sum, lower, upper, b0, b1, T());
}

template <typename T> struct Ones;
template <> struct Ones<__half> { static constexpr unsigned PAIR = 0x3c003c00u; };
template <> struct Ones<__nv_bfloat16> { static constexpr unsigned PAIR = 0x3f803f80u; };

// STEPS: of 16 head elements (head size up to 16 * STEPS). Grid (groups of spans, key-value heads, sequences times
// token_blocks of row_tiles * tile_tokens tokens). Block: 1, 2 or 4 teams; of its spans `slots` (1, 2 or 4) are computed at
// once, and `stages` (1 or 2) tiles of each are in memory. tile_tokens: those whose `group` heads are 16 rows or fewer;
// group_inverse: 65536 / group, rounded up. mask [tokens of all sequences, keys]; null: tokens is 1. masks_all: the mask
// speaks of all rows, not of the new ones alone. partial [tokens of all sequences, query heads, states, size + 4].
template <typename T, int STEPS>
__device__ __forceinline__ void attention(
    const float* qkv, const T* q_norm, const T* k_norm, float epsilon, const T* cos_sin, const int* start_index,
    const unsigned char* mask, T* k_cache, T* v_cache, T* context, float* partial, unsigned* counters, float scale,
    int group, int group_inverse, int tile_tokens, int size, int rotary, int kv_rows, int tokens, int token_blocks,
    int mask_keys, bool masks_all, int span_bits, int states, int slots, int row_tiles, int stages) {
    constexpr int PAIRS = STEPS / 4, AT_ONCE = 4, LANES_OF_ROW = 2 * STEPS;
    extern __shared__ __align__(16) char shared[];
    __shared__ unsigned char nodes[MAX_TOKENS][MAX_TOKENS];  // of each token here: the new tokens that it sees
    __shared__ int lengths[MAX_TOKENS];                      // of each token here: its keys,
    __shared__ int2 divisions[MAX_TOKENS];                   // how many tiles a span of them has, and their groups
    __shared__ int4 heads_here[2 * MAX_TOKENS];              // where those come from and go to that are made ready
    __shared__ float factors[2 * MAX_TOKENS];                // of their norms
    __shared__ bool last_block;
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int warp = __shfl_sync(FULL_WARP, static_cast<int>(threadIdx.x / 32), 0);  // known to be the same for a warp
    const int split = blockIdx.x, kv_head = blockIdx.y, kv_heads = gridDim.y, heads = group * kv_heads;
    const int b = token_blocks == 1 ? blockIdx.z : blockIdx.z / token_blocks, own_tokens = row_tiles * tile_tokens;
    const int first_token = (blockIdx.z - b * token_blocks) * own_tokens, own_count = min(own_tokens, tokens - first_token);
    const int padded = (size + 15) & ~15, stride = padded + 8, ring = stages * slots * KEY_TILE;
    // Rows of `stride` elements: of the ring, [stages, slots, KEY_TILE] keys and as many values; of the new tokens, keys
    // and values; queries [row_tiles, ROWS]; then [GROUP, row_tiles, ROWS, stride] float of spans; of each team weights, the
    // lanes' fragments [TEAM, 32], and the largest scores of each warp's rows [TEAM, ROWS].
    T* rows_here = reinterpret_cast<T*>(shared);
    T* new_keys = rows_here + 2 * ring * stride;
    T* queries = new_keys + 2 * tokens * stride;
    float* spans = reinterpret_cast<float*>(queries + row_tiles * ROWS * stride);

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
        if (lane == 0) {
            const int length = start + count, each = each_of(length, span_bits);
            lengths[t] = length, divisions[t] = make_int2(each, groups_of(length, each));
        }
    }
    // The token of a row, counted from the block's first; -1: none.
    auto token_of = [&](int row) {
        const int t = row % ROWS * group_inverse >> 16, token = row / ROWS * tile_tokens + t;
        return t < tile_tokens && token < own_count ? token : -1;
    };
    auto head_of = [&](int row) { return row % ROWS - (row % ROWS * group_inverse >> 16) * group; };
    // Where positions are new, the block needs all new keys. The one that has the first of them writes its tokens' rows.
    const int new_count = (split + 1) * GROUP * most * KEY_TILE > start ? tokens : 0;
    const bool writes = split * GROUP * least * KEY_TILE <= start && start < (split + 1) * GROUP * least * KEY_TILE;
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

    const int team = warp / TEAM, part = warp % TEAM, teams = warps / TEAM;
    uint4* weights = reinterpret_cast<uint4*>(spans + GROUP * row_tiles * ROWS * stride) + team * TEAM * 32 + lane;
    float* maxima = spans + GROUP * row_tiles * ROWS * stride + teams * TEAM * 32 * 4 + team * TEAM * ROWS + lane / 4;
    // Lane i reads row i % 16 of 16, columns of its lower half for i < 16.
    const unsigned row_base = shared_address(rows_here) + lane / 16 * 16;
    const unsigned query_base = shared_address(queries + lane % 16 * stride) + lane / 16 * 16;
#pragma unroll 1
    for (int each = least; each <= most; ++each) {
#pragma unroll 1
        for (int first_span = 0; first_span < GROUP; first_span += slots) {
            int loaded = each == least && first_span == 0;  // iterations whose tiles are here or come
#pragma unroll 1
            for (int iteration = 0; iteration < each; ++iteration) {
#pragma unroll 1
                for (; loaded < min(iteration + stages, each); ++loaded) load(split * GROUP + first_span, loaded, each);
                if (loaded > iteration + 1) wait_for_copies<1>();
                else wait_for_copies<0>();
                __syncthreads();
#pragma unroll 1
                for (int unit = team; unit < slots * row_tiles; unit += teams) {
                    // A team has another span for each 16 rows: those with new keys take longer.
                    const int tile_of_rows = unit >> (slots >> 1), slot = (unit + tile_of_rows) & (slots - 1);
                    const int begin = ((split * GROUP + first_span + slot) * each + iteration) * KEY_TILE;
                    const int first_own = tile_of_rows * tile_tokens, end_own = min(first_own + tile_tokens, own_count);
                    const int own_row = tile_of_rows * ROWS + lane / 4;
                    int own[2], length[2];  // of the lane's two rows: token, counted from the block's first, and keys
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        own[half] = token_of(own_row + 8 * half);
                        length[half] = own[half] < 0 ? 0 : lengths[own[half]];
                    }
                    float* span = spans + (((first_span + slot) * row_tiles) * ROWS + own_row) * stride;
                    if (begin >= __reduce_max_sync(FULL_WARP, max(length[0], length[1]))) {
                        if (iteration == 0 && part == 0 && lane % 4 == 0) {
                            *reinterpret_cast<float2*>(span + padded) = make_float2(LOWEST, 0.f);
                            *reinterpret_cast<float2*>(span + 8 * stride + padded) = make_float2(LOWEST, 0.f);
                        }
                        continue;
                    }
                    const int ring_row = ((iteration & (stages - 1)) * slots + slot) * KEY_TILE + lane % 16;
                    // The rows of 16 keys of token t: a lane names one of them.
                    auto key_row = [&](int t, int block) {
                        const int position = begin + BLOCK * block + lane % 16;
                        return position < start || position >= lengths[t] ? ring_row + BLOCK * block
                                                                          : 2 * ring + nodes[t][position - start];
                    };
                    auto is_shared = [&](int block) { return masks_all || begin + BLOCK * (block + 1) <= start; };

                    float score[2][4] = {};
                    {
                        const int first = begin + BLOCK * part;
                        const bool shares = is_shared(part);
                        const unsigned query_address = query_base + tile_of_rows * ROWS * stride * sizeof(T);
#pragma unroll 1
                        for (int t = first_own; t < end_own; ++t) {
                            if (first < lengths[t]) {
                                const unsigned address = row_base + key_row(t, part) * stride * sizeof(T);
                                float sum[2][4] = {};
#pragma unroll
                                for (int k = 0; k < STEPS; ++k) {
                                    if (16 * k >= size) continue;
                                    unsigned key[4], query[4];
                                    load_matrices(query, query_address + 32 * k);
                                    load_matrices(key, address + 32 * k);
                                    multiply<T>(sum[0], query, key[0], key[2]);
                                    multiply<T>(sum[1], query, key[1], key[3]);
                                }
#pragma unroll
                                for (int i = 0; i < 4; ++i)
                                    if (shares || own[i / 2] == t) score[0][i] = sum[0][i], score[1][i] = sum[1][i];
                            }
                            if (shares) break;
                        }
                        if (!shares || masks_all) {
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                const int key = first + 2 * (lane % 4) + i % 2;
                                if (key >= length[i / 2]) score[0][i] = no_score();
                                if (key + 8 >= length[i / 2]) score[1][i] = no_score();
                            }
                        }
                        if (masks_all) {
                            unsigned sees[2] = {};
#pragma unroll 1
                            for (int t = first_own; t < end_own; ++t) {
                                const int token = first_token + t, key = first + lane % 16;
                                const unsigned char* seen = mask + static_cast<size_t>(b * tokens + token) * mask_keys;
                                const unsigned bits = __ballot_sync(
                                    FULL_WARP, key == start + token || (key < mask_keys && __ldcg(seen + key) != 0));
                                if (own[0] == t) sees[0] = bits >> 2 * (lane % 4);
                                if (own[1] == t) sees[1] = bits >> 2 * (lane % 4);
                            }
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                if ((sees[i / 2] >> (i % 2) & 1) == 0) score[0][i] = no_score();
                                if ((sees[i / 2] >> (8 + i % 2) & 1) == 0) score[1][i] = no_score();
                            }
                        }
                    }
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float largest = fmaxf(fmaxf(score[0][2 * half], score[0][2 * half + 1]),
                                              fmaxf(score[1][2 * half], score[1][2 * half + 1]));
                        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
                        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
                        if (lane % 4 == 0) maxima[part * ROWS + 8 * half] = largest;
                    }
                    wait_for_team<32 * TEAM>(team);
                    float maximum[2], total[4], correction[2];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const float* of_row = maxima + 8 * half;
                        const float largest = fmaxf(fmaxf(of_row[0], of_row[ROWS]), fmaxf(of_row[2 * ROWS], of_row[3 * ROWS]));
                        float2 before = make_float2(LOWEST, 0.f);
                        if (iteration > 0) before = *reinterpret_cast<const float2*>(span + 8 * half * stride + padded);
                        maximum[half] = fmaxf(before.x, largest * scale);
                        correction[half] = power_of_two(before.x - maximum[half]);
                        total[2 * half] = total[2 * half + 1] = before.y * correction[half];
                    }
                    uint4 own_weights;
                    unsigned* weight_of = &own_weights.x;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float* pair = &score[i / 2][2 * (i % 2)];
                        weight_of[i] = pack<T>(power_of_two(fmaf(pair[0], scale, -maximum[i % 2])),
                                               power_of_two(fmaf(pair[1], scale, -maximum[i % 2])));
                    }
                    weights[part * 32] = own_weights;
                    wait_for_team<32 * TEAM>(team);

                    constexpr int COLUMNS = STEPS / TEAM;  // of 16 head elements, TEAM apart
                    float sum[2 * COLUMNS][4];
#pragma unroll
                    for (int n = 0; n < 2 * COLUMNS; ++n) {
                        const int column = 16 * (part + TEAM * (n / 2)) + 8 * (n % 2) + 2 * (lane % 4);
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            float2 before = make_float2(0.f, 0.f);
                            if (iteration > 0 && column < size)
                                before = *reinterpret_cast<const float2*>(span + 8 * half * stride + column);
                            sum[n][2 * half] = before.x * correction[half], sum[n][2 * half + 1] = before.y * correction[half];
                        }
                    }
#pragma unroll
                    for (int block = 0; block < TEAM; ++block) {
                        const uint4 four = weights[block * 32];
                        const unsigned weight[4] = {four.x, four.y, four.z, four.w};
                        multiply<T>(total, weight, Ones<T>::PAIR, Ones<T>::PAIR);
                        const bool shares = is_shared(block);
#pragma unroll 1
                        for (int t = first_own; t < end_own; ++t) {
                            if (begin + BLOCK * block < lengths[t]) {
                                const int row = key_row(t, block);
                                const unsigned address = row_base + (row + (row < ring ? ring : tokens)) * stride * sizeof(T);
#pragma unroll
                                for (int d = 0; d < COLUMNS; ++d) {
                                    if (16 * (part + TEAM * d) >= size) continue;
                                    unsigned value[4];
                                    load_transposed_matrices(value, address + 32 * (part + TEAM * d));
#pragma unroll
                                    for (int n = 0; n < 2; ++n) {
                                        float next[4];
#pragma unroll
                                        for (int i = 0; i < 4; ++i) next[i] = sum[2 * d + n][i];
                                        multiply<T>(next, weight, value[2 * n], value[2 * n + 1]);
#pragma unroll
                                        for (int i = 0; i < 4; ++i)
                                            if (shares || own[i / 2] == t) sum[2 * d + n][i] = next[i];
                                    }
                                }
                            }
                            if (shares) break;
                        }
                    }
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        if (part == 0 && lane % 4 == 0)
                            *reinterpret_cast<float2*>(span + 8 * half * stride + padded) =
                                make_float2(maximum[half], total[2 * half]);
#pragma unroll
                        for (int n = 0; n < 2 * COLUMNS; ++n) {
                            const int column = 16 * (part + TEAM * (n / 2)) + 8 * (n % 2) + 2 * (lane % 4);
                            if (column < size)
                                *reinterpret_cast<float2*>(span + 8 * half * stride + column) =
                                    make_float2(sum[n][2 * half], sum[n][2 * half + 1]);
                        }
                    }
                }
                __syncthreads();
            }
        }
#pragma unroll 1
        for (int row = warp; row < row_tiles * ROWS; row += warps) {
            const int t = token_of(row);
            if (t < 0 || divisions[t].x != each || split >= divisions[t].y) continue;
            Part<PAIRS> part[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                const float* span = spans + (i * row_tiles * ROWS + row) * stride;
                part[i].maximum = span[padded], part[i].total = span[padded + 1];
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
            const size_t result = (b * tokens + first_token + t) * heads + kv_head * group + head_of(row);
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

    if (threadIdx.x == 0) {  // behind a barrier of the block: the fences speak for all of its threads
        __threadfence();
        // Wraps to 0, ready for the next layer.
        last_block = atomicInc(counters + blockIdx.z * kv_heads + kv_head, blocks - 1) == blocks - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last_block) return;
#pragma unroll 1
    for (int row = warp; row < row_tiles * ROWS; row += warps) {
        const int t = token_of(row);
        if (t < 0) continue;
        const size_t result = (b * tokens + first_token + t) * heads + kv_head * group + head_of(row);
        const float* parts = partial + result * states * (size + 4);
        write_row(context + result * size, merge_groups<PAIRS>(parts, divisions[t].y, size), size);
    }
}

}  // namespace keys_by_position
}  // namespace decode

#define DECODE_ATTENTION_KERNEL(NAME, T, STEPS, THREADS)                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) decode_attention_##STEPS##_##NAME(                       \
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

DECODE_ATTENTION_KERNEL(float16, __half, 4, 512)
DECODE_ATTENTION_KERNEL(float16, __half, 8, 512)
DECODE_ATTENTION_KERNEL(float16, __half, 16, 512)
DECODE_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 4, 512)
DECODE_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 8, 512)
DECODE_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 16, 512)
