// Causal attention of many new tokens over a KV cache, with an online softmax (Dao et al. 2022; Dao 2023): tiles of keys
// pass by a block's queries, whose sums stay in registers. Tiles begin at multiples of KEYS rows and are taken in order;
// one of whose keys a query sees none leaves its maximum, total and sums as they are. So a query's bits depend on the rows
// that it sees alone.
#include "decode/common.cuh"
#include "prefill/arguments.cuh"
#include "shared/quantized_rows.cuh"

namespace prefill {

using decode::load_matrices;
using decode::load_transposed_matrices;
using decode::multiply;
using decode::pack;
using decode::power_of_two;
using decode::shared_address;
using quantized::pair_of;

constexpr bool INT8 = HOST_INT8;  // the caches' rows are
// Whether queries see the latest `window` rows up to their own alone, and the caches are rings of whole tiles: position p is
// in row p % C. What a query sees nothing of still changes nothing, before its window as behind its own row.
constexpr bool WINDOW = HOST_WINDOW;
// Whether each query sees the rows up to one that is given for it, its own or that of a later one of the same step, as the
// tokens of an image see all of it; they never become fewer from query to query. A window goes by the query's own row.
constexpr bool AHEAD = HOST_AHEAD;
#if HOST_AHEAD
using Arguments = AttentionAheadArguments;
#else
using Arguments = CausalAttentionArguments;
#endif

// The last position that a query sees: the query `token` of a sequence, whose own position is start + token.
template <typename Its>
__device__ __forceinline__ int last_seen(const Its& arguments, int sequence, int token, int start) {
    if constexpr (AHEAD) return arguments.last_seen[static_cast<size_t>(sequence) * arguments.T + token];
    return start + token;
}
// The largest score of none; with a window a tile may come before the first that a query sees, and its difference to this
// one must be a number.
__device__ __forceinline__ float no_largest() { return WINDOW ? -1e30f : __int_as_float(0xff800000); }
constexpr int WARPS = HOST_WARPS, THREADS = 32 * WARPS, STAGES = HOST_STAGES;

// Of heads padded to SIZE elements: a warp has TILES times 16 queries; KEYS keys (with their values) are a tile. A warp with
// more queries reads each key from shared memory for all of them. No bit depends on TILES.
template <int SIZE_, int TILES_> struct Shape {
    static constexpr int SIZE = SIZE_, TILES = TILES_, KEYS = SIZE <= 128 ? 64 : 32, ROWS = 16 * TILES * WARPS;
    static constexpr int STEPS = SIZE / 16, CHUNKS = SIZE / 8, BYTES = 2 * SIZE;
    static constexpr bool KEEPS_QUERIES = SIZE == 64;  // in registers
    static constexpr int BLOCKS = TILES == 2 || SIZE == 256 ? 2 : SIZE == 128 ? 3 : 4;  // that registers leave room for
    using Scores = float[TILES][KEYS / 8][4];
};

// Bytes from the beginning of rows in shared memory to 8 elements of one; rows are as long as the padded heads. Which 8
// elements lie where changes from row to row, so that equal columns of 8 rows lie in different banks.
template <int SIZE> __device__ __forceinline__ unsigned offset_of(int row, int chunk) {
    return 2 * SIZE * row + 16 * (chunk ^ (row & 7));
}

// Begins to copy ROWS rows of `size` elements, `stride` apart; zeros stand behind `size`, from row `exist` on, and before row
// `begin`.
template <typename T, int SIZE, int ROWS>
__device__ __forceinline__ void load_rows(unsigned target, const T* source, size_t stride, int exist, int size, int begin) {
    constexpr int CHUNKS = SIZE / 8, AT_ONCE = THREADS / CHUNKS;
    const int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
    const T* own = source + first * stride + 8 * chunk;
#pragma unroll
    for (int i = 0; i < ROWS / AT_ONCE; ++i) {
        const int row = first + AT_ONCE * i;
        const bool exists = row < exist && 8 * chunk < size && (!WINDOW || row >= begin);
        decode::copy_async_16(target + offset_of<SIZE>(row, chunk), exists ? own : source, exists);
        own += AT_ONCE * stride;
    }
}

// The same of rows of int8, `size` apart: each to the second half of its place, from where the same threads' `expand_rows`
// takes it.
template <int SIZE, int ROWS>
__device__ __forceinline__ void load_integers(unsigned target, const char* source, int exist, int size, int begin) {
    constexpr int CHUNKS = SIZE / 16, AT_ONCE = THREADS / CHUNKS;
    const int chunk = threadIdx.x % CHUNKS;
#pragma unroll
    for (int row = threadIdx.x / CHUNKS; row < ROWS; row += AT_ONCE) {
        const bool exists = row < exist && 16 * chunk < size && (!WINDOW || row >= begin);
        const char* own = source + static_cast<size_t>(row) * size + 16 * chunk;
        decode::copy_async_16(target + 2 * SIZE * row + SIZE + 16 * chunk, exists ? own : source, exists);
    }
}

__device__ __forceinline__ void write_shared_16(unsigned shared, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Makes what the thread brought of ROWS rows of int8 elements of T: of each 16 the even ones, then the odd ones. `bits`: see
// `pair_of`. A row is neighbouring lanes' of a warp.
template <typename T, int SIZE, int ROWS> __device__ __forceinline__ void expand_rows(unsigned rows, unsigned bits) {
    constexpr int CHUNKS = SIZE / 16, AT_ONCE = THREADS / CHUNKS;
    const int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
    uint4 sixteen[ROWS / AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROWS / AT_ONCE; ++i)
        sixteen[i] = decode::read_shared_16(rows + 2 * SIZE * (first + AT_ONCE * i) + SIZE + 16 * chunk);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < ROWS / AT_ONCE; ++i) {
        const uint4 x = sixteen[i];
        const int row = first + AT_ONCE * i;
        write_shared_16(rows + offset_of<SIZE>(row, 2 * chunk), pair_of<0>(x.x, bits, T()), pair_of<0>(x.y, bits, T()),
                        pair_of<0>(x.z, bits, T()), pair_of<0>(x.w, bits, T()));
        write_shared_16(rows + offset_of<SIZE>(row, 2 * chunk + 1), pair_of<1>(x.x, bits, T()), pair_of<1>(x.y, bits, T()),
                        pair_of<1>(x.z, bits, T()), pair_of<1>(x.w, bits, T()));
    }
}

// Puts the columns of a warp's ROWS queries in the order of those of expanded keys.
template <int SIZE, int ROWS> __device__ __forceinline__ void reorder_queries(unsigned rows) {
    constexpr int GROUPS = SIZE / 16;
#pragma unroll 2
    for (int i = threadIdx.x % 32; i < ROWS * GROUPS; i += 32) {
        const unsigned low = rows + offset_of<SIZE>(i / GROUPS, i % GROUPS * 2);
        const unsigned high = rows + offset_of<SIZE>(i / GROUPS, i % GROUPS * 2 + 1);
        const uint4 x = decode::read_shared_16(low), y = decode::read_shared_16(high);
        auto both = [](unsigned a, unsigned b, int which) { return __byte_perm(a, b, which == 0 ? 0x5410 : 0x7632); };
        write_shared_16(low, both(x.x, x.y, 0), both(x.z, x.w, 0), both(y.x, y.y, 0), both(y.z, y.w, 0));
        write_shared_16(high, both(x.x, x.y, 1), both(x.z, x.w, 1), both(y.x, y.y, 1), both(y.z, y.w, 1));
    }
    __syncwarp();
}

// Scores, or weights, of a tile's keys times the keys' scales.
template <typename Its>
__device__ __forceinline__ void scale_keys(typename Its::Scores& score, const float* scales) {
#pragma unroll
    for (int n = 0; n < Its::KEYS / 8; ++n) {
        const float2 two = *reinterpret_cast<const float2*>(scales + 8 * n + 2 * (threadIdx.x % 4));
#pragma unroll
        for (int m = 0; m < Its::TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) score[m][n][i] *= i % 2 ? two.y : two.x;
    }
}

// A warp's queries: sums, and of the two rows of a lane in each tile, largest score and the lane's part of the total.
template <typename Its> struct Sums {
    float sum[Its::TILES][Its::SIZE / 8][4], largest[Its::TILES][2], total[Its::TILES][2];
};

// Products of a warp's queries and a tile's keys.
template <typename T, typename Its>
__device__ __forceinline__ void compute_scores(typename Its::Scores& score,
                                               const unsigned (&kept)[Its::TILES][Its::STEPS][4],
                                               unsigned queries, unsigned keys) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < Its::TILES; ++m)
#pragma unroll
        for (int n = 0; n < Its::KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) score[m][n][i] = 0.f;
#pragma unroll
    for (int k = 0; k < Its::STEPS; ++k) {
        unsigned query[Its::TILES][4];
#pragma unroll
        for (int m = 0; m < Its::TILES; ++m) {
            if constexpr (!Its::KEEPS_QUERIES) {
                load_matrices(query[m], queries + offset_of<Its::SIZE>(16 * m + lane % 16, 2 * k + lane / 16));
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) query[m][i] = kept[m][k][i];
            }
        }
#pragma unroll
        for (int n = 0; n < Its::KEYS / 16; ++n) {
            unsigned key[4];
            load_matrices(key, keys + offset_of<Its::SIZE>(16 * n + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < Its::TILES; ++m) {
                multiply<T>(score[m][2 * n], query[m], key[0], key[1]);
                multiply<T>(score[m][2 * n + 1], query[m], key[2], key[3]);
            }
        }
    }
}

// Scores become weights; largest scores, totals and sums follow. `scale` is that of powers of two.
template <typename Its>
__device__ __forceinline__ void take_softmax(typename Its::Scores& score, Sums<Its>& sums, float scale) {
    float correction[Its::TILES][2];
    bool changes = false;
#pragma unroll
    for (int m = 0; m < Its::TILES; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = sums.largest[m][half];
#pragma unroll
            for (int n = 0; n < Its::KEYS / 8; ++n)
                largest = fmaxf(largest, fmaxf(score[m][n][2 * half], score[m][n][2 * half + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(decode::FULL_WARP, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(decode::FULL_WARP, largest, 2));
            changes |= largest != sums.largest[m][half];
            correction[m][half] = power_of_two((sums.largest[m][half] - largest) * scale);
            sums.largest[m][half] = largest;
            const float offset = INT8 ? fmaf(-largest, scale, quantized::WEIGHT_BITS) : -largest * scale;
            float total = sums.total[m][half] * correction[m][half];
#pragma unroll
            for (int n = 0; n < Its::KEYS / 8; ++n) {
                float* two = &score[m][n][2 * half];
                two[0] = power_of_two(fmaf(two[0], scale, offset)), two[1] = power_of_two(fmaf(two[1], scale, offset));
                total += two[0] + two[1];
            }
            sums.total[m][half] = total;
        }
    }
    if (!__any_sync(decode::FULL_WARP, changes)) return;  // all corrections are 1
#pragma unroll
    for (int m = 0; m < Its::TILES; ++m)
#pragma unroll
        for (int n = 0; n < Its::SIZE / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums.sum[m][n][i] *= correction[m][i / 2];
}

// Adds the values that stand at a tile's keys, weighted.
template <typename T, typename Its>
__device__ __forceinline__ void add_values(Sums<Its>& sums, const typename Its::Scores& weight, unsigned values) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < Its::KEYS / 16; ++k) {
        unsigned weights[Its::TILES][4];
#pragma unroll
        for (int m = 0; m < Its::TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* two = &weight[m][2 * k + i / 2][i % 2 * 2];
                weights[m][i] = pack<T>(two[0], two[1]);
            }
#pragma unroll
        for (int n = 0; n < Its::SIZE / 16; ++n) {
            unsigned value[4];
            load_transposed_matrices(value, values + offset_of<Its::SIZE>(16 * k + lane % 16, 2 * n + lane / 16));
#pragma unroll
            for (int m = 0; m < Its::TILES; ++m) {
                multiply<T>(sums.sum[m][2 * n], weights[m], value[0], value[1]);
                multiply<T>(sums.sum[m][2 * n + 1], weights[m], value[2], value[3]);
            }
        }
    }
}

// A warp's results to where its queries were, then from there to the rows of `context`, `stride` apart.
template <typename T, typename Its>
__device__ __forceinline__ void write_results(Sums<Its>& sums, char* queries, T* context, size_t stride, int exist,
                                              int size) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < Its::TILES; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = sums.total[m][half];
            total += __shfl_xor_sync(decode::FULL_WARP, total, 1);
            total += __shfl_xor_sync(decode::FULL_WARP, total, 2);
            const float inverse = 1.f / total;
            const int row = 16 * m + 8 * half + lane / 4;
#pragma unroll
            for (int n = 0; n < Its::SIZE / 8; ++n) {
                // Two neighbours; of int8, sums of even columns are in one eight, those of odd ones in the next.
                const int column = INT8 ? n / 2 * 16 + lane % 4 * 4 + n % 2 * 2 : 8 * n + lane % 4 * 2;
                const float* low = &sums.sum[m][INT8 ? n / 2 * 2 : n][2 * half + (INT8 ? n % 2 : 0)];
                const float* high = INT8 ? low + 4 : low + 1;
                *reinterpret_cast<unsigned*>(queries + offset_of<Its::SIZE>(row, column / 8) + column % 8 * 2) =
                    pack<T>(*low * inverse, *high * inverse);
            }
        }
    }
    __syncwarp();
#pragma unroll 4
    for (int i = lane; i < 16 * Its::TILES * Its::CHUNKS; i += 32) {
        const int row = i / Its::CHUNKS, chunk = i % Its::CHUNKS;
        if (row < exist && 8 * chunk < size)
            *reinterpret_cast<uint4*>(context + row * stride + 8 * chunk) =
                *reinterpret_cast<const uint4*>(queries + offset_of<Its::SIZE>(row, chunk));
    }
}

// Grid: query heads, sequences, blocks of queries, of which the last, which see most keys, begin first.
template <typename T, int SIZE, int TILES>
__global__ void __launch_bounds__(THREADS, (Shape<SIZE, TILES>::BLOCKS)) causal_attention(Arguments arguments) {
    using Its = Shape<SIZE, TILES>;
    constexpr int SCALES = Its::BYTES * (Its::ROWS + 2 * STAGES * Its::KEYS);  // where scales of keys, then of values stand
    static_assert(SCALES + (INT8 ? 8 * STAGES * Its::KEYS : 0) == HOST_BYTES, "shared memory as the host counts it");
    extern __shared__ __align__(128) char memory[];
    const int size = arguments.D, kv_heads = arguments.G, heads = arguments.E / size, tokens = arguments.T;
    const int head = blockIdx.x, sequence = blockIdx.y, kv_head = head / (heads / kv_heads);
    const int first_token = (gridDim.z - 1 - blockIdx.z) * Its::ROWS, lane = threadIdx.x % 32;
    const int start = arguments.rows.start[sequence], rows = static_cast<int>(arguments.C);
    const int last = AHEAD ? last_seen(arguments, sequence, min(first_token + Its::ROWS, tokens) - 1, start) + 1
                           : start + min(first_token + Its::ROWS, tokens);
    const int end = WINDOW ? last : min(last, rows);  // of the rows that a query of the block sees
    const int tiles = (end + Its::KEYS - 1) / Its::KEYS, window = arguments.rows.window;
    const int first_tile = WINDOW ? max(start + first_token + 1 - window, 0) / Its::KEYS : 0;
    auto row_of_tile = [&](int tile) {
        const unsigned position = static_cast<unsigned>(tile) * Its::KEYS;
        return WINDOW ? position % static_cast<unsigned>(rows) : position;
    };
    const size_t own_rows = (static_cast<size_t>(sequence) * kv_heads + kv_head) * rows;
    const T* const cached_keys = reinterpret_cast<const T*>(arguments.rows.k_cache) + own_rows * size;
    const T* const cached_values = reinterpret_cast<const T*>(arguments.rows.v_cache) + own_rows * size;
    const size_t first_place = static_cast<size_t>(sequence) * tokens + first_token;
    const T* const source = reinterpret_cast<const T*>(arguments.qkv) + first_place * arguments.W + head * size;
    const unsigned shared = shared_address(memory), ring = shared + Its::BYTES * Its::ROWS;

    auto load_tile = [&](int tile) {
        const unsigned target = ring + tile % STAGES * (2 * Its::BYTES * Its::KEYS);
        const size_t first = row_of_tile(tile);
        const int exist = end - tile * Its::KEYS, begin = start + first_token + 1 - window - tile * Its::KEYS;
        if constexpr (INT8) {
            const size_t row = own_rows + first;
            load_integers<SIZE, Its::KEYS>(target, arguments.rows.k_cache + row * size, exist, size, begin);
            load_integers<SIZE, Its::KEYS>(
                target + Its::BYTES * Its::KEYS, arguments.rows.v_cache + row * size, exist, size, begin);
            const int key = threadIdx.x % Its::KEYS;
            const float* scales = threadIdx.x < Its::KEYS ? arguments.row_scales.key : arguments.row_scales.value;
            const bool exists = key < exist && (!WINDOW || key >= begin);
            if (threadIdx.x < 2 * Its::KEYS)
                decode::copy_async_4(shared + SCALES + 4 * (tile % STAGES * 2 * Its::KEYS + threadIdx.x),
                                     scales + row + (exists ? key : 0), exists);
            decode::commit_copies();
            return;
        }
        load_rows<T, SIZE, Its::KEYS>(target, cached_keys + first * size, size, exist, size, begin);
        load_rows<T, SIZE, Its::KEYS>(target + Its::BYTES * Its::KEYS, cached_values + first * size, size, exist, size, begin);
        decode::commit_copies();
    };
    load_rows<T, SIZE, Its::ROWS>(shared, source, arguments.W, tokens - first_token, size, 0);
    load_tile(first_tile);

    const int warp_row = threadIdx.x / 32 * 16 * Its::TILES;  // its first query's, in the block
    const int first_row = start + first_token + warp_row;      // and in the cache
    const bool exists = first_token + warp_row < tokens;
    // Where the rows end that queries of the warp see, and of each row of a lane the last that it sees.
    int warp_end = first_row + 16 * Its::TILES, first_end = first_row, seen[Its::TILES][2];
    if constexpr (AHEAD) {
        auto last_of = [&](int row) {  // what stands for queries that do not exist is not written
            return last_seen(arguments, sequence, min(first_token + warp_row + row, tokens - 1), start);
        };
        warp_end = last_of(16 * Its::TILES - 1) + 1, first_end = last_of(0);
#pragma unroll
        for (int m = 0; m < Its::TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) seen[m][half] = last_of(16 * m + 8 * half + lane / 4);
    }
    const unsigned queries = shared + Its::BYTES * warp_row;
    const float scale = static_cast<float>(arguments.scale) * 1.4426950408889634f;
    unsigned kept[Its::TILES][Its::STEPS][4];
    const unsigned bits = quantized::number_bits(T());
    Sums<Its> sums;
#pragma unroll
    for (int m = 0; m < Its::TILES; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            sums.largest[m][half] = no_largest(), sums.total[m][half] = 0.f;
#pragma unroll
        for (int n = 0; n < Its::SIZE / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums.sum[m][n][i] = 0.f;
    }
#pragma unroll 1
    for (int tile = first_tile; tile < tiles; ++tile) {
        const unsigned keys = ring + tile % STAGES * (2 * Its::BYTES * Its::KEYS);
        const int first_key = tile * Its::KEYS;
        decode::wait_for_copies<0>();
        if constexpr (INT8) expand_rows<T, SIZE, 2 * Its::KEYS>(keys, bits);
        __syncthreads();  // this tile is there, and the place of the one before is free
        if (tile + 1 < tiles) load_tile(tile + 1);
        if (INT8 && tile == first_tile) reorder_queries<SIZE, 16 * Its::TILES>(queries);
        if constexpr (Its::KEEPS_QUERIES) {
            if (tile == first_tile)
#pragma unroll
                for (int m = 0; m < Its::TILES; ++m)
#pragma unroll
                    for (int k = 0; k < Its::STEPS; ++k)
                        load_matrices(kept[m][k], queries + offset_of<Its::SIZE>(16 * m + lane % 16, 2 * k + lane / 16));
        }
        if (!exists || first_key >= warp_end) continue;
        if (WINDOW && first_key + Its::KEYS <= first_row + 1 - window) continue;
        float score[Its::TILES][Its::KEYS / 8][4];
        compute_scores<T, Its>(score, kept, queries, keys);
        const float* scales = reinterpret_cast<const float*>(memory + SCALES) + tile % STAGES * 2 * Its::KEYS;
        if constexpr (INT8) scale_keys<Its>(score, scales);
        if (first_key + Its::KEYS - 1 > first_end) {
#pragma unroll
            for (int m = 0; m < Its::TILES; ++m)
#pragma unroll
                for (int n = 0; n < Its::KEYS / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (first_key + 8 * n + 2 * (lane % 4) + i % 2 >
                            (AHEAD ? seen[m][i / 2] : first_row + 16 * m + lane / 4 + i / 2 * 8))
                            score[m][n][i] = __int_as_float(0xff800000);
        }
        if (WINDOW && first_key <= first_row + 16 * Its::TILES - 1 - window) {
#pragma unroll
            for (int m = 0; m < Its::TILES; ++m)
#pragma unroll
                for (int n = 0; n < Its::KEYS / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (first_key + 8 * n + 2 * (lane % 4) + i % 2 <= first_row + 16 * m + lane / 4 + i / 2 * 8 - window)
                            score[m][n][i] = __int_as_float(0xff800000);
        }
        take_softmax<Its>(score, sums, scale);
        if constexpr (INT8) scale_keys<Its>(score, scales + Its::KEYS);
        add_values<T, Its>(sums, score, keys + Its::BYTES * Its::KEYS);
    }
    if (!exists) return;
    T* const context = reinterpret_cast<T*>(arguments.context) + (first_place + warp_row) * arguments.E + head * size;
    write_results<T, Its>(sums, memory + Its::BYTES * warp_row, context, arguments.E, tokens - first_token - warp_row, size);
}

}  // namespace prefill
