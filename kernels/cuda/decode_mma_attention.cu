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
// has keys of its own: blocks of 16 keys are then multiplied once for every token, whose rows alone are kept.
#include "decode_fragments.cuh"

namespace decode {
namespace keys_by_position {

constexpr int KEY_TILE = 64, BLOCK = 16;  // keys of a tile, and of a step of the instruction
constexpr int GROUP = 4;                  // spans that are merged first
constexpr int MAX_TOKENS = 64;
constexpr int ROWS = 16;

// Of a key that is not seen: minus infinity.
__device__ __forceinline__ float no_score() { return __int_as_float(0xff800000); }

__device__ __forceinline__ int divide_up(int value, int by) { return (value + by - 1) / by; }

// How the keys of a token are divided: tiles into spans of `each`.
__device__ __forceinline__ int tiles_of(int length) { return divide_up(length, KEY_TILE); }
__device__ __forceinline__ int each_of(int length, int max_spans) { return divide_up(tiles_of(length), max_spans); }

// A lane's share of a head: pairs of elements that are rotated together, of those behind them neighbours.
template <int PAIRS> struct HeadPairs {
    float low[PAIRS], high[PAIRS], cosine[PAIRS], sine[PAIRS];
};

__device__ __forceinline__ int2 places_of_pair(int pair, int rotary) {
    return pair < rotary / 2 ? make_int2(pair, pair + rotary / 2) : make_int2(2 * pair, 2 * pair + 1);
}

template <typename T, int PAIRS>
__device__ __forceinline__ void read_head(
    HeadPairs<PAIRS>& head, const float* source, const T* cos_sin, int size, int rotary) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = threadIdx.x % 32 + 32 * i;
        head.low[i] = head.high[i] = head.sine[i] = 0.f, head.cosine[i] = 1.f;
        if (2 * pair >= size) continue;
        const int2 place = places_of_pair(pair, rotary);
        head.low[i] = __ldcg(source + place.x), head.high[i] = __ldcg(source + place.y);
        if (pair < rotary / 2)
            head.cosine[i] = to_float(__ldcg(cos_sin + pair)), head.sine[i] = to_float(__ldcg(cos_sin + rotary / 2 + pair));
    }
}

// Norm and rotation; by all lanes of a warp.
template <typename T, int PAIRS>
__device__ __forceinline__ void finish_head(
    HeadPairs<PAIRS>& head, const T* norm_weight, float epsilon, int size, int rotary) {
    if (norm_weight != nullptr) {
        float squares = 0.f;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i)
            squares = fmaf(head.low[i], head.low[i], squares), squares = fmaf(head.high[i], head.high[i], squares);
        const float factor = rsqrtf(warp_sum(squares) / size + epsilon);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int pair = threadIdx.x % 32 + 32 * i;
            if (2 * pair >= size) continue;
            const int2 place = places_of_pair(pair, rotary);
            head.low[i] = head.low[i] * factor * to_float(norm_weight[place.x]);
            head.high[i] = head.high[i] * factor * to_float(norm_weight[place.y]);
        }
    }
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const float low = head.low[i], high = head.high[i];
        head.low[i] = fmaf(low, head.cosine[i], -high * head.sine[i]);
        head.high[i] = fmaf(high, head.cosine[i], low * head.sine[i]);
    }
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

// Merges the parts of a row, of groups or of single spans, in their order, and writes the row.
template <typename T, int PAIRS>
__device__ __forceinline__ void merge_row(T* result, const float* parts, int count, bool of_groups, int size) {
    const int lane = threadIdx.x % 32, distance = size + 4;
    Part<PAIRS> whole;
    clear(whole);
#pragma unroll 1
    for (int i = lane; i < count; i += 32) whole.maximum = fmaxf(whole.maximum, __ldcg(parts + i * distance));
    whole.maximum = warp_max(whole.maximum);
    if (of_groups) {
#pragma unroll 4
        for (int i = 0; i < count; ++i) add(whole, read_part<PAIRS>(parts + i * distance, true, size));
    } else {
#pragma unroll 1
        for (int first = 0; first < count; first += 2 * GROUP) {
            Part<PAIRS> spans[2][GROUP];
#pragma unroll
            for (int i = 0; i < 2 * GROUP; ++i)
                spans[i / GROUP][i % GROUP] = read_part<PAIRS>(parts + (first + i) * distance, first + i < count, size);
            add(whole, merge_group(spans[0]));
            if (first + GROUP < count) add(whole, merge_group(spans[1]));
        }
    }
    const float inverse = 1.f / whole.total;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i)
        if (2 * lane + 64 * i < size)
            *reinterpret_cast<unsigned*>(result + 2 * lane + 64 * i) =
                pack<T>(whole.sum[i][0] * inverse, whole.sum[i][1] * inverse);
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

// Weights are rounded to T for the tensor cores; of bfloat16, whose 8 bits are few, what is lost is multiplied, too.
template <typename T> struct Weights;
template <> struct Weights<__half> { static constexpr int TERMS = 1; };
template <> struct Weights<__nv_bfloat16> { static constexpr int TERMS = 2; };

// STEPS: of 16 head elements (head size up to 16 * STEPS). Grid (spans / slots, key-value heads times groups of
// row_tiles * (16 / group) tokens, sequences). Block: row_tiles warps for each of `slots` spans, at least 4 warps.
// slots is 1, 2 or GROUP. mask [tokens of all sequences, keys]; null: tokens is 1. masks_all: the mask speaks of all rows,
// not of the new ones alone. partial [tokens of all sequences, query heads, states, size + 4].
template <typename T, int STEPS>
__device__ __forceinline__ void attention(
    const float* qkv, const T* q_norm, const T* k_norm, float epsilon, const T* cos_sin, const int* start_index,
    const unsigned char* mask, T* k_cache, T* v_cache, T* context, float* partial, unsigned* counters, float scale,
    int group, int size, int rotary, int kv_heads, int kv_rows, int tokens, int mask_keys, bool masks_all,
    int max_spans, int states, int slots, int row_tiles, int stages) {
    constexpr int PAIRS = STEPS / 4, AT_ONCE = 4 / PAIRS;
    extern __shared__ __align__(16) char shared[];
    __shared__ unsigned char nodes[MAX_TOKENS][MAX_TOKENS];  // of each token here: the new tokens that it sees
    __shared__ int lengths[MAX_TOKENS];                      // of each token here: its keys
    __shared__ bool last_block;
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int split = blockIdx.x, kv_head = blockIdx.y % kv_heads, b = blockIdx.z, heads = group * kv_heads;
    const int tile_tokens = ROWS / group, own_tokens = row_tiles * tile_tokens;
    const int first_token = blockIdx.y / kv_heads * own_tokens, own_count = min(own_tokens, tokens - first_token);
    const int padded = divide_up(size, 16) * 16, stride = padded + 8, ring = stages * slots * KEY_TILE;
    // Rows of `stride` elements: of the ring, [stages, slots, KEY_TILE] keys and as many values; of the new tokens, keys
    // and values; queries [row_tiles, ROWS].
    T* rows_here = reinterpret_cast<T*>(shared);
    T* new_keys = rows_here + 2 * ring * stride;
    T* queries = new_keys + 2 * tokens * stride;
    float* span_parts = reinterpret_cast<float*>(shared);  // [slots, row_tiles, ROWS, stride], in the place of the ring

    launch_next_kernel();
    const int start = min(__ldcg(start_index + b), kv_rows - tokens), longest = start + tokens;
    const int least = each_of(masks_all ? longest : start + 1, max_spans), most = each_of(longest, max_spans);
    int blocks = 0;
    for (int each = least; each <= most; ++each)
        blocks = max(blocks, divide_up(divide_up(min(tiles_of(longest), each * max_spans), each), slots));
    if (split >= blocks) {
        wait_for_previous_kernel();
        return;
    }
    T* cached_keys = k_cache + (static_cast<size_t>(b) * kv_heads + kv_head) * kv_rows * size;
    T* cached_values = v_cache + (static_cast<size_t>(b) * kv_heads + kv_head) * kv_rows * size;

    // Rows before `start` were written in earlier steps, so they may be read before the previous kernel is done. Behind
    // them stand zeros: a weight of 0 must meet the same value wherever a token stands.
    auto load = [&](int iteration, int each) {
        if (iteration < each) {
            const int chunks = padded / 8, first_place = iteration % stages * slots * KEY_TILE;
#pragma unroll 4
            for (int i = threadIdx.x; i < slots * KEY_TILE * chunks; i += blockDim.x) {
                const int place = i / chunks, column = i % chunks * 8;
                const int tile = (split * slots + place / KEY_TILE) * each + iteration;
                const int row = tile * KEY_TILE + place % KEY_TILE;
                const bool exists = row < start && column < size;
                const size_t source = exists ? static_cast<size_t>(row) * size + column : 0;
                const unsigned target = shared_address(rows_here + (first_place + place) * stride + column);
                copy_async_16(target, cached_keys + source, exists);
                copy_async_16(target + ring * stride * sizeof(T), cached_values + source, exists);
            }
        }
        commit_copies();
    };
#pragma unroll 1
    for (int i = 0; i < stages; ++i) load(i, least);

#pragma unroll 1
    for (int t = warp; t < own_count; t += warps) {
        const int token = first_token + t;
        const unsigned char* visible = mask + (static_cast<size_t>(b) * tokens + token) * mask_keys + start;
        int count = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int node = lane + 32 * i;
            const bool sees = node < tokens && (node == token || masks_all ||
                                                (mask != nullptr && start + node < mask_keys && __ldcg(visible + node) != 0));
            const unsigned bits = __ballot_sync(FULL_WARP, sees);
            if (sees) nodes[t][count + __popc(bits & ((1u << lane) - 1))] = static_cast<unsigned char>(node);
            count += __popc(bits);
        }
        if (lane == 0) lengths[t] = start + count;
    }

    wait_for_previous_kernel();
    const int width = (heads + 2 * kv_heads) * size;
    const float* new_tokens = qkv + static_cast<size_t>(b) * tokens * width;
    const T* rotations = cos_sin + static_cast<size_t>(b) * tokens * rotary;
#pragma unroll 1
    for (int first = warp; first < row_tiles * ROWS; first += warps * AT_ONCE) {
        HeadPairs<PAIRS> head[AT_ONCE];
        auto token_of = [&](int row) {  // -1: none
            const int r = row % ROWS, t = row / ROWS * tile_tokens + r / group;
            return row < row_tiles * ROWS && r < tile_tokens * group && t < own_count ? t : -1;
        };
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int row = first + i * warps, t = token_of(row), node = first_token + t;
            if (t < 0) continue;
            read_head<T, PAIRS>(head[i], new_tokens + node * width + (kv_head * group + row % ROWS % group) * size,
                                rotations + node * rotary, size, rotary);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int row = first + i * warps;
            const bool exists = token_of(row) >= 0;
            if (exists) finish_head<T, PAIRS>(head[i], q_norm, epsilon, size, rotary);
            if (row >= row_tiles * ROWS) continue;
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) {
                const int pair = lane + 32 * p;
                const int2 place = exists && 2 * pair < size ? places_of_pair(pair, rotary) : make_int2(2 * pair, 2 * pair + 1);
                if (2 * pair >= padded) continue;
                const bool real = exists && 2 * pair < size;
                queries[row * stride + place.x] = from_float<T>(real ? head[i].low[p] : 0.f);
                queries[row * stride + place.y] = from_float<T>(real ? head[i].high[p] : 0.f);
            }
        }
    }
    if ((split + 1) * slots * most * KEY_TILE > start) {
        // The block that has the first new position writes its tokens' rows to the cache.
        const bool writes = start / KEY_TILE / least / slots == split;
#pragma unroll 1
        for (int first = warps - 1 - warp; first < tokens; first += warps * AT_ONCE) {
            HeadPairs<PAIRS> head[AT_ONCE];
            float2 value[AT_ONCE][PAIRS];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int node = first + i * warps;
                if (node >= tokens) continue;
                const float* source = new_tokens + node * width + (heads + kv_head) * size;
                read_head<T, PAIRS>(head[i], source, rotations + node * rotary, size, rotary);
#pragma unroll
                for (int p = 0; p < PAIRS; ++p) {
                    const int column = 2 * lane + 64 * p;
                    value[i][p] = make_float2(0.f, 0.f);
                    if (column < size)
                        value[i][p] = __ldcg(reinterpret_cast<const float2*>(source + kv_heads * size + column));
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int node = first + i * warps;
                T* new_key = new_keys + node * stride;
                if (node >= tokens) continue;
                finish_head<T, PAIRS>(head[i], k_norm, epsilon, size, rotary);
                const bool own = writes && node >= first_token && node < first_token + own_count;
                const size_t cached = static_cast<size_t>(start + node) * size;
#pragma unroll
                for (int p = 0; p < PAIRS; ++p) {
                    const int pair = lane + 32 * p;
                    if (2 * pair >= padded) continue;
                    const int2 place = 2 * pair < size ? places_of_pair(pair, rotary) : make_int2(2 * pair, 2 * pair + 1);
                    const T low = from_float<T>(head[i].low[p]), high = from_float<T>(head[i].high[p]);
                    const unsigned both = pack<T>(value[i][p].x, value[i][p].y);
                    new_key[place.x] = low, new_key[place.y] = high;
                    *reinterpret_cast<unsigned*>(new_key + tokens * stride + 2 * pair) = both;
                    if (!own || 2 * pair >= size) continue;
                    cached_keys[cached + place.x] = low, cached_keys[cached + place.y] = high;
                    *reinterpret_cast<unsigned*>(cached_values + cached + 2 * pair) = both;
                }
            }
        }
    }
    __syncthreads();

    // This warp's rows, and the two of this lane: tokens counted from the block's first, -1 where there is none.
    const int slot = warp / row_tiles, tile_of_rows = warp % row_tiles, first_own = tile_of_rows * tile_tokens;
    const int end_own = min(first_own + tile_tokens, own_count);
    const bool computes = slot < slots && first_own < end_own;
    int own[2], length[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * half, t = first_own + row / group;
        own[half] = row < tile_tokens * group && t < end_own ? t : -1;
        length[half] = own[half] < 0 || !computes ? 0 : lengths[own[half]];
    }
    int longest_here = 0;
#pragma unroll 1
    for (int t = first_own; t < end_own; ++t) longest_here = max(longest_here, lengths[t]);
    // Lane i reads row i % 16 of a block, columns of its lower half for i < 16.
    const unsigned lane_offset = lane / 16 * 8 * sizeof(T);
    const unsigned row_base = shared_address(rows_here) + lane_offset;
    const unsigned query_base = shared_address(queries + (tile_of_rows * ROWS + lane % 16) * stride) + lane_offset;
    constexpr bool KEEPS_QUERIES = STEPS <= 8;
    unsigned query[KEEPS_QUERIES ? STEPS : 1][4];
    if constexpr (KEEPS_QUERIES) {
        if (computes) {
#pragma unroll
            for (int k = 0; k < STEPS; ++k)
                if (16 * k < size) load_matrices(query[k], query_base + 32 * k);
        }
    }

    // Scores of 16 keys, whose rows the lanes name.
    auto multiply_keys = [&](float (&low)[4], float (&high)[4], int row) {
        const unsigned address = row_base + row * stride * sizeof(T);
#pragma unroll
        for (int i = 0; i < 4; ++i) low[i] = high[i] = 0.f;
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            if (16 * k >= size) continue;
            unsigned key[4];
            load_matrices(key, address + 32 * k);
            if constexpr (KEEPS_QUERIES) {
                multiply<T>(low, query[k], key[0], key[2]);
                multiply<T>(high, query[k], key[1], key[3]);
            } else {
                unsigned part[4];
                load_matrices(part, query_base + 32 * k);
                multiply<T>(low, part, key[0], key[2]);
                multiply<T>(high, part, key[1], key[3]);
            }
        }
    };

    Rows<STEPS> rows;
#pragma unroll 1
    for (int each = least; each <= most; ++each) {
        if (each > least) {
#pragma unroll 1
            for (int i = 0; i < stages; ++i) load(i, each);
        }
        rows.reset();
#pragma unroll 1
        for (int iteration = 0; iteration < each; ++iteration) {
            if (stages > 1) wait_for_copies<1>();
            else wait_for_copies<0>();
            __syncthreads();
            const int begin = ((split * slots + slot) * each + iteration) * KEY_TILE;
            if (computes && begin < longest_here) {
                const int ring_row = (iteration % stages * slots + slot) * KEY_TILE;
                const bool together = masks_all || begin + KEY_TILE <= start;
                auto key_row = [&](int t, int block) {
                    const int key = BLOCK * block + lane % 16, position = begin + key;
                    return position < start || position >= lengths[t] ? ring_row + key : 2 * ring + nodes[t][position - start];
                };
                float score[8][4];
                if (together) {
#pragma unroll
                    for (int block = 0; block < 4; ++block)
                        multiply_keys(score[2 * block], score[2 * block + 1],
                                      masks_all ? key_row(first_own, block) : ring_row + BLOCK * block + lane % 16);
                } else {
#pragma unroll
                    for (int block = 0; block < 4; ++block) {
                        const int first = begin + BLOCK * block;
                        const bool committed = first + BLOCK <= start;
#pragma unroll
                        for (int i = 0; i < 4; ++i) score[2 * block][i] = score[2 * block + 1][i] = 0.f;
#pragma unroll 1
                        for (int t = first_own; t < (committed ? first_own + 1 : end_own); ++t) {
                            if (first >= lengths[t]) continue;
                            float low[4], high[4];
                            multiply_keys(low, high, key_row(t, block));
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                if (!committed && own[i / 2] != t) continue;
                                score[2 * block][i] = low[i], score[2 * block + 1][i] = high[i];
                            }
                        }
                    }
                }
                if (masks_all || !together) {
                    unsigned long long visible[2];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int count = max(0, min(KEY_TILE, length[half] - begin));
                        visible[half] = count == KEY_TILE ? ~0ull : (1ull << count) - 1;
                    }
                    if (masks_all) {
#pragma unroll 1
                        for (int t = first_own; t < end_own; ++t) {
                            const int token = first_token + t;
                            const unsigned char* row = mask + (static_cast<size_t>(b) * tokens + token) * mask_keys;
                            unsigned bits[2];
#pragma unroll
                            for (int i = 0; i < 2; ++i) {
                                const int key = begin + lane + 32 * i;
                                bits[i] = __ballot_sync(FULL_WARP, key == start + token ||
                                                                       (key < mask_keys && __ldcg(row + key) != 0));
                            }
                            const unsigned long long sees = static_cast<unsigned long long>(bits[1]) << 32 | bits[0];
#pragma unroll
                            for (int half = 0; half < 2; ++half)
                                if (own[half] == t) visible[half] &= sees;
                        }
                    }
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const unsigned long long mine = visible[half] >> 2 * (lane % 4);
#pragma unroll
                        for (int n = 0; n < 8; ++n)
#pragma unroll
                            for (int i = 0; i < 2; ++i)
                                if ((mine >> (8 * n + i) & 1) == 0) score[n][2 * half + i] = no_score();
                    }
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
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
                for (int block = 0; block < 4; ++block) {
                    const int first = begin + BLOCK * block;
                    unsigned weight[Weights<T>::TERMS][4];
#pragma unroll
                    for (int term = 0; term < Weights<T>::TERMS; ++term) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            float* pair = &score[2 * block + i / 2][2 * (i % 2)];
                            weight[term][i] = pack<T>(pair[0], pair[1]);
                            const float2 kept = unpack<T>(weight[term][i]);
                            pair[0] -= kept.x, pair[1] -= kept.y;
                        }
                        multiply<T>(rows.total, weight[term], Ones<T>::PAIR, Ones<T>::PAIR);
                    }
                    const bool shares = together || first + BLOCK <= start;
#pragma unroll 1
                    for (int t = first_own; t < (shares ? first_own + 1 : end_own); ++t) {
                        if (!shares && first >= lengths[t]) continue;
                        const int row = key_row(t, block), value_row = row + (row < ring ? ring : tokens);
                        const unsigned address = row_base + value_row * stride * sizeof(T);
#pragma unroll
                        for (int d = 0; d < STEPS; ++d) {
                            if (16 * d >= size) continue;
                            unsigned value[4];
                            load_transposed_matrices(value, address + 32 * d);
#pragma unroll
                            for (int n = 0; n < 2; ++n) {
                                float sum[4];
#pragma unroll
                                for (int i = 0; i < 4; ++i) sum[i] = rows.sum[2 * d + n][i];
#pragma unroll
                                for (int term = 0; term < Weights<T>::TERMS; ++term)
                                    multiply<T>(sum, weight[term], value[2 * n], value[2 * n + 1]);
#pragma unroll
                                for (int i = 0; i < 4; ++i)
                                    if (shares || own[i / 2] == t) rows.sum[2 * d + n][i] = sum[i];
                            }
                        }
                    }
                }
            }
            __syncthreads();
            load(iteration + stages, each);
        }
        wait_for_copies<0>();

        // What of a row's keys is here goes to global memory, of a group of spans merged.
        auto part_of = [&](int t, int head, int state) {
            const size_t row = static_cast<size_t>(b) * tokens + first_token + t;
            return partial + ((row * heads + kv_head * group + head) * states + state) * (size + 4);
        };
        if (slots < GROUP) {
            const int span = split * slots + slot;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (own[half] < 0 || !computes || each_of(length[half], max_spans) != each ||
                    span * each >= tiles_of(length[half]))
                    continue;
                float* part = part_of(own[half], (lane / 4 + 8 * half) % group, span);
                if (lane % 4 == 0)
                    __stcg(reinterpret_cast<float2*>(part), make_float2(rows.maximum[half], rows.total[2 * half]));
#pragma unroll
                for (int n = 0; n < 2 * STEPS; ++n)
                    if (8 * n < size)
                        __stcg(reinterpret_cast<float2*>(part + 4 + 8 * n + 2 * (lane % 4)),
                               make_float2(rows.sum[n][2 * half], rows.sum[n][2 * half + 1]));
            }
        } else {
            __syncthreads();
            if (computes) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float* part = span_parts + (warp * ROWS + lane / 4 + 8 * half) * stride;
                    if (lane % 4 == 0)
                        *reinterpret_cast<float2*>(part + padded) = make_float2(rows.maximum[half], rows.total[2 * half]);
#pragma unroll
                    for (int n = 0; n < 2 * STEPS; ++n)
                        if (8 * n < size)
                            *reinterpret_cast<float2*>(part + 8 * n + 2 * (lane % 4)) =
                                make_float2(rows.sum[n][2 * half], rows.sum[n][2 * half + 1]);
                }
            }
            __syncthreads();
#pragma unroll 1
            for (int row = warp; row < row_tiles * ROWS; row += warps) {
                const int r = row % ROWS, t = row / ROWS * tile_tokens + r / group;
                if (r >= tile_tokens * group || t >= own_count || each_of(lengths[t], max_spans) != each ||
                    split * GROUP * each >= tiles_of(lengths[t]))
                    continue;
                Part<PAIRS> spans[GROUP];
#pragma unroll
                for (int i = 0; i < GROUP; ++i) {
                    const float* part = span_parts + (i * row_tiles * ROWS + row) * stride;
                    spans[i].maximum = part[padded], spans[i].total = part[padded + 1];
#pragma unroll
                    for (int p = 0; p < PAIRS; ++p) {
                        const int column = 2 * lane + 64 * p;
                        if (column >= size) continue;
                        const float2 sum = *reinterpret_cast<const float2*>(part + column);
                        spans[i].sum[p][0] = sum.x, spans[i].sum[p][1] = sum.y;
                    }
                }
                const Part<PAIRS> merged = merge_group(spans);
                float* part = part_of(t, r % group, split);
                if (lane == 0) __stcg(reinterpret_cast<float2*>(part), make_float2(merged.maximum, merged.total));
#pragma unroll
                for (int p = 0; p < PAIRS; ++p) {
                    const int column = 2 * lane + 64 * p;
                    if (column < size)
                        __stcg(reinterpret_cast<float2*>(part + 4 + column), make_float2(merged.sum[p][0], merged.sum[p][1]));
                }
            }
            __syncthreads();
        }
    }

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)  // wraps to 0, ready for the next layer
        last_block = atomicInc(counters + b * gridDim.y + blockIdx.y, blocks - 1) == blocks - 1;
    __syncthreads();
    if (!last_block) return;
    __threadfence();
#pragma unroll 1
    for (int row = warp; row < row_tiles * ROWS; row += warps) {
        const int r = row % ROWS, t = row / ROWS * tile_tokens + r / group;
        if (r >= tile_tokens * group || t >= own_count) continue;
        const size_t result = (static_cast<size_t>(b) * tokens + first_token + t) * heads + kv_head * group + r % group;
        const int tiles = tiles_of(lengths[t]), spans = divide_up(tiles, each_of(lengths[t], max_spans));
        merge_row<T, PAIRS>(context + result * size, partial + result * states * (size + 4),
                            slots < GROUP ? spans : divide_up(spans, GROUP), slots == GROUP, size);
    }
}

}  // namespace keys_by_position
}  // namespace decode

#define DECODE_MMA_ATTENTION_KERNEL(NAME, T, STEPS, THREADS)                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) decode_mma_attention_##STEPS##_##NAME(                       \
        const float* qkv, const T* q_norm, const T* k_norm, float epsilon, const T* cos_sin, const int* start_index,   \
        const unsigned char* mask, T* k_cache, T* v_cache, T* context, float* partial, unsigned* counters,             \
        float scale, int group, int size, int rotary, int kv_heads, int kv_rows, int tokens, int mask_keys,            \
        int masks_all, int max_spans, int states, int slots, int row_tiles, int stages) {                              \
        decode::keys_by_position::attention<T, STEPS>(                                                                 \
            qkv, q_norm, k_norm, epsilon, cos_sin, start_index, mask, k_cache, v_cache, context, partial, counters,    \
            scale, group, size, rotary, kv_heads, kv_rows, tokens, mask_keys, masks_all != 0, max_spans, states,       \
            slots, row_tiles, stages);                                                                                 \
    }

DECODE_MMA_ATTENTION_KERNEL(float16, __half, 4, 512)
DECODE_MMA_ATTENTION_KERNEL(float16, __half, 8, 256)
DECODE_MMA_ATTENTION_KERNEL(float16, __half, 16, 256)
DECODE_MMA_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 4, 512)
DECODE_MMA_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 8, 256)
DECODE_MMA_ATTENTION_KERNEL(bfloat16, __nv_bfloat16, 16, 256)
