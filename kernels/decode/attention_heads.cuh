// What a block brings to shared memory: tiles of committed rows, which keys its tokens have, and the new tokens' queries,
// keys and values made ready: norm, rotary embedding, KV rows.
#pragma once
#include "decode/attention_block.cuh"

namespace decode {
namespace keys_by_position {

// Begins to copy a tile of rows of int8, with their scales, see `load_tiles`. The warps of a slot copy its tile among
// themselves: where that is one warp, no other must wait for it.
template <bool KEYS, bool VALUES, int PART, typename T, int STEPS>
__device__ __forceinline__ void load_integers(const Block<T, STEPS>& block, int tile, int stage) {
    constexpr int OWN = Block<T, STEPS>::PART_STEPS, COPIES = 2 * OWN;  // of 16 bytes a lane, of keys and of values
    const int lane = threadIdx.x % 32, first = tile * KEY_TILE, exist = block.start - first;
    const int place = (stage * block.slots + block.slot) * KEY_TILE, before = WINDOW ? block.low - first : 0;
    const int cached = block.row_of(first);
    const int begin = block.PARTS == 1 ? 16 * lane : block.PART * (VALUES ? block.part() : PART);
    const signed char* keys = block.cached_keys + static_cast<size_t>(cached) * block.PADDED + begin;
    const signed char* values = block.cached_values + static_cast<size_t>(cached) * block.PADDED + begin;
    const unsigned targets = shared_address(block.keys + place * block.STRIDE);
    auto copy = [&](int i) {
        const int row = 32 % OWN == 0 ? lane / OWN + 32 / OWN * i : (lane + 32 * i) / OWN;
        const int chunk = 32 % OWN == 0 ? lane % OWN : lane + 32 * i - OWN * row;
        const int further = block.PARTS == 1 ? 512 * i : block.PADDED * row + 16 * chunk;
        const unsigned target = targets + block.bytes(row) + 16 * chunk;
        const bool exists = row < exist && row >= before;
        if (KEYS) copy_async_16(target, keys + further, exists);
        if (VALUES) copy_async_16(target + block.bytes(block.values_row()), values + further, exists);
    };
    const int part = block.row_tile * TILE_WARPS + block.member, parts = block.row_tiles * TILE_WARPS;
    if (TILE_WARPS == 1 && parts == 1) {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) copy(i);
    } else {
#pragma unroll 1
        for (int i = part; i < COPIES; i += parts) copy(i);
    }
    if (!KEYS || PART > 0 || part != 0) return;
    const unsigned scales = shared_address(block.scales + place + lane);
#pragma unroll
    for (int i = 0; i < KEY_TILE / 32; ++i) {
        const int row = lane + 32 * i;
        const bool exists = row < exist && row >= before;
        copy_async_4(scales + 128 * i, block.cached_key_scales + cached + row, exists);
        copy_async_4(scales + 128 * i + 4 * block.ring, block.cached_value_scales + cached + row, exists);
    }
}

// Begins to copy the tiles of a round to the ring; IN_TURN, part PART of its keys, or its values. Rows before
// `start` were written in earlier steps, so they may be read before the previous kernel is done. Behind them, and before the
// window, stand zeros: a weight of 0 must meet the same value wherever a token stands, and no value of another sequence.
template <bool KEYS = true, bool VALUES = !IN_TURN, int PART = 0, typename T, int STEPS>
__device__ __forceinline__ void load_tiles(const Block<T, STEPS>& block, const Division& division, int round, int stage) {
    constexpr int LANES_OF_ROW = STEPS <= 4 ? 8 : STEPS <= 8 ? 16 : 32;
    const int first = threadIdx.x / LANES_OF_ROW, rows_at_once = blockDim.x / LANES_OF_ROW;
    const int column = threadIdx.x % LANES_OF_ROW * 8;
    const int slots = !INT8 && round < division.rounds && column < block.PART ? block.slots : 0;
    if constexpr (INT8) {
        const int tile = round < division.rounds ? block.tile_of(division, block.slot, round) : -1;
        if (tile >= 0) load_integers<KEYS, VALUES, PART>(block, tile, stage);
    }
#pragma unroll 1
    for (int slot = 0; slot < slots; ++slot) {
        const int tile = block.tile_of(division, slot, round);
        if (tile < 0) continue;
        const int exist = column < block.size ? block.start - tile * KEY_TILE : 0;
        const int place = (stage * block.slots + slot) * KEY_TILE + first;
        const int before = WINDOW ? block.low - tile * KEY_TILE : 0;
        unsigned target = shared_address(block.keys + place * block.STRIDE + column);
        int source = (block.row_of(tile * KEY_TILE) + first) * block.size + column;
        const int of_value = block.PART * block.part();
#pragma unroll 4
        for (int row = first; row < KEY_TILE; row += rows_at_once) {
            const bool exists = row < exist && row >= before;
            auto copy = [&](const CacheElement<T>* rows, int place, int part) {
                copy_async_16(target + block.bytes(place), rows + (exists ? source + part : 0), exists);
            };
            if (KEYS) copy(block.cached_keys, 0, block.PART * PART);
            if (KEYS && APART) copy(block.cached_keys, block.ring, block.PART);
            if (VALUES) copy(block.cached_values, block.values_row(), block.PARTS == 1 ? 0 : of_value);
            source += rows_at_once * block.size, target += block.bytes(rows_at_once);
        }
    }
    commit_copies();
}

// The new tokens that each token sees, and the number of its keys. A warp reads the masks of some tokens at once.
template <typename T, int STEPS> __device__ __forceinline__ void list_keys(const Block<T, STEPS>& block) {
    constexpr int AT_ONCE = 4, HALVES = MAX_TOKENS / 32;
    if constexpr (ONE_TOKEN) return;
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
                const int column = block.start + block.shift + node;
                const bool exists = t < block.own_count && node < block.tokens && column < block.mask_keys;
                mask[i][half] = 0;
                if (reads && exists) mask[i][half] = __ldcg(block.mask_of(t) + column);
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

// What a lane's elements of normed queries and keys are multiplied by.
template <int STEPS> struct NormWeights {
    float2 query[Lanes<STEPS>::QUADS][2], key[Lanes<STEPS>::QUADS][2];
};

// They are constant: read before the previous kernel is done.
template <typename T, int STEPS>
__device__ __forceinline__ void read_norms(NormWeights<STEPS>& norms, const Block<T, STEPS>& block) {
    if (block.q_norm == nullptr) return;
    auto read = [&](const T* weight, int place) { return read_norm(weight, place, block.offset); };
#pragma unroll
    for (int q = 0; q < Lanes<STEPS>::QUADS; ++q) {
        const int quad = threadIdx.x % Lanes<STEPS>::OF_HEAD + 32 * q;
        if (4 * quad >= block.size) continue;
        const int2 place = places_of(quad, block.rotary);
        norms.query[q][0] = read(block.q_norm, place.x), norms.query[q][1] = read(block.q_norm, place.y);
        norms.key[q][0] = read(block.k_norm, place.x), norms.key[q][1] = read(block.k_norm, place.y);
    }
}

// What is made ready: a new token's key, its value, or a query. Where it lies in qkv, its row of cos_sin, and the row that it
// goes to, of the new keys, the new values or the queries. `cached`: its row in the caches (-1: none). `rotary`: how many of its
// elements are rotated.
enum class Kind { KEY, VALUE, QUERY };
template <typename T> struct Head {
    const float* source;
    const T* rotation;
    int target, cached, rotary;
    Kind kind;
};

// Item number `item` of `keys` new keys, as many values, and then the queries.
template <typename T, int STEPS>
__device__ __forceinline__ Head<T> head_of(const Block<T, STEPS>& block, int item, int keys) {
    Head<T> head;
    head.kind = item < keys ? Kind::KEY : item < 2 * keys ? Kind::VALUE : Kind::QUERY;
    head.rotary = head.kind == Kind::VALUE ? 0 : block.rotary;
    const bool is_query = head.kind == Kind::QUERY;
    const int row = item - 2 * keys, node = ONE_TOKEN ? 0 : head.kind == Kind::VALUE ? item - keys : item;
    const int t = is_query ? block.token_of(row) : node - block.first_token;
    const int own = row - t * block.group, token = block.sequence * block.tokens + block.first_token + t;
    const int place = is_query ? block.kv_head * block.group + own
                               : block.heads + block.kv_head + (head.kind == Kind::VALUE ? block.kv_heads : 0);
    head.source = block.qkv + (token * (block.heads + 2 * block.kv_heads) + place) * block.size;
    head.rotation = block.cos_sin + token * block.rotary_columns + (is_query ? block.query_columns : 0);
    const int tile = t * block.tile_inverse >> 16;
    const int query = tile * ROWS + (t - tile * block.tile_tokens) * block.group + own;
    head.target = is_query ? query : node;
    head.cached = !is_query && t >= 0 && t < block.own_count ? block.row_of(block.start + node) : -1;
    return head;
}

// Two neighbours of a query. Of rows of int8, see `fragment_of`.
template <typename T> __device__ __forceinline__ void write_query(T* query, int column, unsigned two) {
    if constexpr (!INT8) {
        *reinterpret_cast<unsigned*>(query + column) = two;
    } else {
        unsigned short* target = reinterpret_cast<unsigned short*>(query) + (column & ~15) + column % 16 / 2;
        target[0] = two, target[8] = two >> 16;
    }
}

// As many of these as a warp makes ready at once, as they come from qkv: where warps share tiles one after the other, as code
// is fetched anew for each layer, and takes longer than what it does.
template <typename T, int STEPS> struct Heads {
    static constexpr int QUADS = Lanes<STEPS>::QUADS, AT_ONCE = TILE_WARPS > 1 ? 1 : 4 / QUADS;
    Head<T> head[AT_ONCE];
    float2 low[AT_ONCE][QUADS], high[AT_ONCE][QUADS];
    unsigned cosine[AT_ONCE][QUADS], sine[AT_ONCE][QUADS];
};

// Begins to read them, `step` items apart from a lane's `own` on, where the warp's `first` is below `items`.
template <typename T, int STEPS>
__device__ __forceinline__ void read_heads(Heads<T, STEPS>& heads, const Block<T, STEPS>& block, int first, int own, int step,
                                           int items, int keys) {
    const int lane = threadIdx.x % Lanes<STEPS>::OF_HEAD;
#pragma unroll
    for (int i = 0; i < heads.AT_ONCE; ++i) {
        if (first + i * step >= items) break;
        const Head<T> head = heads.head[i] = head_of(block, min(own + i * step, items - 1), keys);
#pragma unroll
        for (int q = 0; q < heads.QUADS; ++q) {
            const int quad = min(lane + 32 * q, block.size / 4 - 1), turned = 4 * quad < head.rotary ? 2 * quad : 0;
            const int2 place = places_of(quad, head.rotary);
            if (NEIGHBOURS && 4 * quad < head.rotary) {
                const float4 four = __ldcg(reinterpret_cast<const float4*>(head.source + 4 * quad));
                take_apart(heads.low[i][q], heads.high[i][q], four);
            } else {
                heads.low[i][q] = __ldcg(reinterpret_cast<const float2*>(head.source + place.x));
                heads.high[i][q] = __ldcg(reinterpret_cast<const float2*>(head.source + place.y));
            }
            heads.cosine[i][q] = heads.sine[i][q] = 0u;
            if (block.rotary > 0) {
                heads.cosine[i][q] = __ldcg(reinterpret_cast<const unsigned*>(head.rotation + turned));
                heads.sine[i][q] = __ldcg(reinterpret_cast<const unsigned*>(head.rotation + turned + block.rotary / 2));
            }
        }
    }
}

// Norm and rotary embedding of the block's queries, and of the new tokens' keys and values if it has them, to shared memory, of
// keys the part PART (APART: both) and of values the block's; the block's own tokens' keys and values to the caches too. The
// next ones are on their way meanwhile.
template <int PART, typename T, int STEPS>
__device__ __forceinline__ void make_heads_ready(const Block<T, STEPS>& block, const NormWeights<STEPS>& norms,
                                                 bool has_new) {
    using Own = Lanes<STEPS>;
    using Kept = KeptFour<T, INT8>;
    constexpr int QUADS = Own::QUADS, AT_ONCE = Heads<T, STEPS>::AT_ONCE, SIZE = Block<T, STEPS>::PART;
    const int lane = threadIdx.x % Own::OF_HEAD, size = block.size;
    const int keys = has_new ? block.tokens : 0, items = PART == 0 ? 2 * keys + block.rows : keys;
    const int begin = block.warp * Own::HEADS, group = threadIdx.x / Own::OF_HEAD - begin, step = block.warps * Own::HEADS;
    Heads<T, STEPS> next{};
#pragma unroll 1
    for (int first = begin - AT_ONCE * step; first < items; first += AT_ONCE * step) {
        Heads<T, STEPS> heads = next;
        const int own = first + group, behind = first + AT_ONCE * step;
        read_heads(next, block, behind, behind + group, step, items, keys);
        if (first < begin) continue;
        auto& [head, low, high, cosine, sine] = heads;
        auto weight_of = [&](int i, int q, int n) {
            const float2 weight = heads.head[i].kind == Kind::KEY ? norms.key[q][n] : norms.query[q][n];
            return heads.head[i].kind == Kind::VALUE ? make_float2(1.f, 1.f) : weight;
        };
#pragma unroll
        for (int i = 0; i < AT_ONCE && block.q_norm != nullptr; ++i) {
            if (first + i * step >= items) break;
            auto weight = [&](int q, int n) { return NORMS_BEHIND ? make_float2(1.f, 1.f) : weight_of(i, q, n); };
            const bool norms_it = VALUES_NORMED || head[i].kind != Kind::VALUE;
            norm_head<STEPS>(low[i], high[i], weight, lane, size, block.inverse_size, block.epsilon, norms_it);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i * step >= items) break;
            const int rotary = head[i].rotary, cached = head[i].cached * size;
            const bool is_value = head[i].kind == Kind::VALUE;
            unsigned two[QUADS], other[QUADS], bits = 0u;
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                auto weight = [&](int n) { return NORMS_BEHIND ? weight_of(i, q, n) : make_float2(1.f, 1.f); };
                const float2 x = heads.low[i][q], y = heads.high[i][q];
                const bool rotates = 4 * (lane + 32 * q) < rotary;
                rotate<T>(two[q], other[q], x, y, cosine[i][q], sine[i][q], rotates, weight(0), weight(1));
                if (is_value) two[q] = pack<T>(x.x, x.y), other[q] = pack<T>(y.x, y.y);  // a zero keeps its sign
                if (INT8 && 4 * (lane + 32 * q) < size)
                    bits = max(bits, max(quantized::size_bits(unpack<T>(two[q])), quantized::size_bits(unpack<T>(other[q]))));
            }
            const float scale = INT8 && has_new ? quantized::row_scale<Own::OF_HEAD>(bits) : 0.f;
            if (own + i * step >= items) continue;
            const int row = head[i].target;
            if (INT8 && head[i].kind != Kind::QUERY && lane == 0) {
                block.scales[2 * block.ring + (is_value ? new_scales_of(block.tokens) : 0) + row] = scale;
                if (cached >= 0) (is_value ? block.cached_value_scales : block.cached_key_scales)[head[i].cached] = scale;
            }
            T* query = block.queries + row * block.QUERY_STRIDE;
            CacheElement<T>* key = block.new_keys + row * block.STRIDE;
            CacheElement<T>* value = key + (IN_TURN ? block.ring : (AREAS - 1) * block.tokens) * block.STRIDE;
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                const int quad = lane + 32 * q, column = 4 * quad;
                if (column >= size) continue;
                const int2 place = places_of(quad, rotary);
                if (head[i].kind == Kind::QUERY) {
                    write_query(query, place.x, two[q]), write_query(query, place.y, other[q]);
                    continue;
                }
                const Kept kept(two[q], other[q], make_uint2(two[q], other[q]), {scale, scale});
                auto part_of = [](int x) { return Block<T, STEPS>::PARTS == 1 ? 0 : x / SIZE; };
                if (is_value) {
                    if (part_of(column) == block.part()) kept.write_value(value + column - SIZE * block.part());
                    if (cached >= 0) kept.write_value(block.cached_values + cached + column);
                    continue;
                }
                auto write_part = [&](int x, typename Kept::Two two) {
                    CacheElement<T>* of_part = key + (APART ? part_of(x) * block.tokens * block.STRIDE : 0);
                    if (APART || part_of(x) == PART) *reinterpret_cast<typename Kept::Two*>(of_part + x - SIZE * part_of(x)) = two;
                };
                write_part(place.x, kept.two), write_part(place.y, kept.other);
                if (PART == 0 && cached >= 0)
                    kept.write_key(block.cached_keys + cached + place.x, block.cached_keys + cached + place.y);
            }
            // Columns behind the head are multiplied too.
            if (lane == 0 && size < block.PADDED && !is_value) {
                T* elements = head[i].kind == Kind::QUERY ? query : reinterpret_cast<T*>(key);
                *reinterpret_cast<uint4*>(elements + size) = make_uint4(0u, 0u, 0u, 0u);
            }
        }
    }
}

}  // namespace keys_by_position
}  // namespace decode
