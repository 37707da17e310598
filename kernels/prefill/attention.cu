// Causal attention of many new tokens over a KV cache: tiles of 64 keys pass by a block's queries, whose sums stay in registers
// (Dao et al. 2022; Dao 2023), and each query has the bits of the decode step of its token, however the prompt is cut.
//
// So its keys are divided as there: by their number into spans of 2^bits tiles, or within a window of always as many. A span
// has its own online softmax, and the states of spans are merged in order. A tile or a span of which a query sees nothing
// changes none of its sums. Queries of a block differ in bits where their numbers of keys pass a power of two: tiles pass
// by once for each value, and what queries of others get then is not written.
#include "prefill/arguments.cuh"
#include "prefill/tiles.cuh"
#include "shared/attention.cuh"

namespace prefill {

using namespace attending;
using decode::load_matrices;
using decode::load_transposed_matrices;
using decode::multiply;
using decode::multiply_alone;

constexpr bool INT8 = HOST_INT8;  // the caches' rows are
// Whether queries see the latest `window` rows up to their own alone, and the caches are rings of whole tiles: position p is
// in row p % C.
constexpr bool WINDOW = HOST_WINDOW;
// Whether each query sees the rows up to one that is given for it, its own or that of a later one of the same step, as the
// tokens of an image see all of it; they never become fewer from query to query. A window, and spans, go by the query's own
// row.
constexpr bool AHEAD = HOST_AHEAD;
#if HOST_AHEAD
using Arguments = AttentionAheadArguments;
#else
using Arguments = CausalAttentionArguments;
#endif

// The last row that a token of a sequence, whose new ones begin at `start`, sees.
template <typename Its>
__device__ __forceinline__ int last_seen(const Its& arguments, int sequence, int token, int start) {
    if constexpr (AHEAD) return arguments.last_seen[static_cast<size_t>(sequence) * arguments.T + token];
    return start + token;
}

// Logarithms: of the most spans without a window, and of the tiles of a span of one.
struct Division {
    int span_bits, window_bits;
};
static_assert(KEY_TILE == HOST_KEY_TILE && sizeof(Division) == HOST_DIVISION_BYTES, "as the host has them");

// Heads are padded to SIZE elements; a warp has TILES times 16 queries, and reads each key for all of them. STAGES tiles of keys
// and values have places in memory; with one, values come while scores are computed, and keys while values are added.
// PASS_TILES and PASS_COLUMNS: the queries and columns of sums that registers hold twice, of a span and of all before, where
// spans have several tiles; keys pass by again for others. No bit depends on any of these.
template <int SIZE_, int TILES_> struct Shape {
    static constexpr int SIZE = SIZE_, TILES = TILES_, ROWS = 16 * TILES * WARPS, STAGES = SIZE <= 128 ? 2 : 1;
    static constexpr int STEPS = SIZE / 16, CHUNKS = SIZE / 8, BYTES = 2 * SIZE;
    static constexpr int PASS_TILES = SIZE == 64 ? TILES : 1, PASS_COLUMNS = SIZE < 128 ? SIZE : 128;
    static constexpr int BLOCKS = SIZE * TILES == 64 ? 3 : 2;  // that registers leave room for
};

// Sums of one span's tile of 32 columns, or fewer, are added to those before at once.
constexpr int CHUNK = 32;

// What a block works on: queries of a head of a sequence, from `first_token` on.
template <typename T, typename Its> struct Block {
    const Arguments& arguments;
    const Division division;
    int size, tokens, rows, window, sequence, head, first_token, start;
    int first_tile, tiles, end;  // that its queries see, and where the rows end
    size_t first_row;            // of the caches' rows, that of the sequence's head
    unsigned queries, ring, number_bits;
    const float* scales;

    // Of the warp, the first query in the block, its position, where rows end that its queries see, the end of those that the
    // first of them sees, and the first tile.
    int warp_row, position, warp_end, shared_end, warp_tile;
    bool exists;

    // The last row that a query of the block sees; what stands for queries that do not exist is not written.
    __device__ __forceinline__ int last_of(int row) const {
        return last_seen(arguments, sequence, min(first_token + row, tokens - 1), start);
    }

    // The logarithm of the tiles of a span of a query of the block.
    __device__ __forceinline__ int bits_of(int row) const {
        if constexpr (WINDOW) return division.window_bits;
        return tile_bits_of(start + min(first_token + row, tokens - 1) + 1, division.span_bits);
    }

    __device__ __forceinline__ void find_place(char* memory) {
        const int heads = arguments.E / arguments.D, kv_heads = arguments.G;
        size = arguments.D, tokens = arguments.T, rows = arguments.C, window = arguments.rows.window;
        head = blockIdx.x, sequence = blockIdx.y, first_token = (gridDim.z - 1 - blockIdx.z) * Its::ROWS;
        start = arguments.rows.start[sequence];
        end = last_of(Its::ROWS - 1) + 1;
        if (!WINDOW) end = min(end, rows);
        tiles = tiles_of(end), first_tile = WINDOW ? max(start + first_token + 1 - window, 0) / KEY_TILE : 0;
        first_row = (static_cast<size_t>(sequence) * kv_heads + head / (heads / kv_heads)) * rows;
        queries = shared_address(memory), ring = queries + Its::BYTES * Its::ROWS;
        scales = reinterpret_cast<const float*>(memory + Its::BYTES * (Its::ROWS + 2 * Its::STAGES * KEY_TILE));
        number_bits = quantized::number_bits(T());

        warp_row = threadIdx.x / 32 * 16 * Its::TILES, position = start + first_token + warp_row;
        exists = first_token + warp_row < tokens;
        warp_end = min(last_of(warp_row + 16 * Its::TILES - 1) + 1, end), shared_end = last_of(warp_row) + 1;
        warp_tile = WINDOW ? max(position + 1 - window, 0) / KEY_TILE : 0;
    }

    // Where keys, and behind them values, of a tile lie.
    __device__ __forceinline__ unsigned place_of(int tile) const {
        return ring + tile % Its::STAGES * (2 * Its::BYTES * KEY_TILE);
    }

    // Begins to copy a tile's keys (0) or values (1).
    template <int KIND> __device__ __forceinline__ void load_tile(int tile) const {
        const unsigned target = place_of(tile) + KIND * Its::BYTES * KEY_TILE;
        const unsigned begin = static_cast<unsigned>(tile) * KEY_TILE;
        const size_t row = first_row + (WINDOW ? begin % static_cast<unsigned>(rows) : begin);
        const int exist = end - tile * KEY_TILE, seen = WINDOW ? start + first_token + 1 - window - tile * KEY_TILE : 0;
        const char* const cache = KIND == 0 ? arguments.rows.k_cache : arguments.rows.v_cache;
        if constexpr (INT8) {
            load_integers<Its::SIZE, KEY_TILE>(target, cache + row * size, exist, size, seen);
            const float* own = KIND == 0 ? arguments.row_scales.key : arguments.row_scales.value;
            const int key = threadIdx.x;
            const bool is_there = key < exist && key >= seen;
            if (key < KEY_TILE)
                decode::copy_async_4(shared_address(scales_of<KIND>(tile) + key), own + row + (is_there ? key : 0), is_there);
        } else {
            const T* const own = reinterpret_cast<const T*>(cache) + row * size;
            load_rows<T, Its::SIZE, KEY_TILE>(target, own, size, exist, size, seen);
        }
    }

    template <int KIND> __device__ __forceinline__ const float* scales_of(int tile) const {
        return scales + (tile % Its::STAGES * 2 + KIND) * KEY_TILE;
    }

    template <int KIND> __device__ __forceinline__ void expand_tile(int tile) const {
        if constexpr (INT8) expand_rows<T, Its::SIZE, KEY_TILE>(place_of(tile) + KIND * Its::BYTES * KEY_TILE, number_bits);
    }
};

template <int TILES> using Scores = float[TILES][2 * BLOCKS][4];
template <int TILES> using Weights = unsigned[TILES][BLOCKS][4];

// A warp's queries, or some tiles of 16 of them, and some columns: largest scores (log2), totals and sums of the span, and of
// all spans before. Of the two rows of a lane in each tile; of spans of one tile there are no sums.
template <int TILES, int COLUMNS, bool SPANS> struct Sums {
    float whole_maximum[TILES][2], whole_total[TILES][2], whole[TILES][COLUMNS / 8][4];
    float maximum[TILES][2], total[TILES][2], sum[SPANS ? TILES : 1][SPANS ? COLUMNS / 8 : 1][4];
};

// Products of queries and a tile's keys.
template <typename T, typename Its, int TILES>
__device__ __forceinline__ void compute_scores(Scores<TILES>& score, unsigned queries, unsigned keys) {
    const int lane = decode::in_register(threadIdx.x % 32);  // places of matrices are found anew: registers are few
#pragma unroll
    for (int k = 0; k < Its::STEPS; ++k) {
        unsigned query[TILES][4];
#pragma unroll
        for (int m = 0; m < TILES; ++m)
            load_matrices(query[m], queries + offset_of<Its::SIZE>(16 * m + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int n = 0; n < BLOCKS; ++n) {
            unsigned key[4];
            load_matrices(key, keys + offset_of<Its::SIZE>(16 * n + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                if (k == 0) {
                    multiply_alone(score[m][2 * n], query[m], key[0], key[1], T());
                    multiply_alone(score[m][2 * n + 1], query[m], key[2], key[3], T());
                    continue;
                }
                multiply<T>(score[m][2 * n], query[m], key[0], key[1]);
                multiply<T>(score[m][2 * n + 1], query[m], key[2], key[3]);
            }
        }
    }
}

// Scales a tile's scores, and hides those of keys that queries do not see; the first query is `row` of the block's.
template <typename T, typename Its, int TILES>
__device__ __forceinline__ void finish_scores(Scores<TILES>& score, const Block<T, Its>& block, int row, int tile) {
    const int lane = threadIdx.x % 32, begin = tile * KEY_TILE, own = block.start + block.first_token + row;
    if constexpr (INT8) {
#pragma unroll
        for (int n = 0; n < 2 * BLOCKS; ++n) {
            const float2 two = *reinterpret_cast<const float2*>(block.template scales_of<0>(tile) + 8 * n + 2 * (lane % 4));
#pragma unroll
            for (int m = 0; m < TILES; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) score[m][n][i] *= i % 2 ? two.y : two.x;
        }
    }
    const bool hides = begin + KEY_TILE > block.shared_end;
    const bool leaves = WINDOW && begin <= own + 16 * TILES - 1 - block.window;
    if (!hides && !leaves) return;
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int place = 16 * m + 8 * half + lane / 4, last = AHEAD ? block.last_of(row + place) : own + place;
            const int before = WINDOW ? own + place - block.window : -1;
#pragma unroll
            for (int n = 0; n < 2 * BLOCKS; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int key = begin + 8 * n + 2 * (lane % 4) + i;
                    if (key > last || key <= before) score[m][n][2 * half + i] = no_score();
                }
        }
}

// Makes weights of a tile's scores; largest scores follow, and totals begin. What sums before are multiplied by is left in
// `correction`.
template <int HALF, typename T, typename Its, int TILES, typename OwnSums>
__device__ __forceinline__ void weigh_rows(Weights<TILES>& weight, float (&total)[TILES][4], float (&correction)[TILES][2],
                                           OwnSums& sums, const Scores<TILES>& score, const Block<T, Its>& block, float factor,
                                           int tile, bool is_first) {
    float2 scale[2 * BLOCKS];
    if constexpr (INT8) {
#pragma unroll
        for (int n = 0; n < 2 * BLOCKS; ++n)
            scale[n] = *reinterpret_cast<const float2*>(block.template scales_of<1>(tile) + 8 * n + 2 * (threadIdx.x % 4));
    }
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
        const float largest = largest_score<HALF>(score[m]), before = is_first ? LOWEST : sums.maximum[m][HALF];
        const float maximum = fmaxf(before, largest * factor);
        sums.maximum[m][HALF] = maximum, correction[m][HALF] = power_of_two(before - maximum);
        const float kept = is_first ? 0.f : sums.total[m][HALF] * correction[m][HALF];
        total[m][2 * HALF] = total[m][2 * HALF + 1] = kept;
        weigh<HALF, INT8>(weight[m], total[m][2 * HALF], score[m], factor, maximum, scale, T());
    }
}

// Adds weights to totals, as rounded, but of int8, whose weights are not those of values.
template <typename T, int TILES>
__device__ __forceinline__ void add_weights(float (&total)[TILES][4], const Weights<TILES>& weight) {
    if constexpr (INT8) return;
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
        for (int m = 0; m < TILES; ++m) multiply<T>(total[m], weight[m][k], Ones<T>::PAIR, Ones<T>::PAIR);
}

// Adds a tile's values, weighted, to sums of COUNT eights of columns from number `eight` on; BEGINS: there are none before.
template <typename T, typename Its, bool BEGINS, int COUNT, int TILES>
__device__ __forceinline__ void add_values(float (&sum)[TILES][COUNT][4], const Weights<TILES>& weight, unsigned values,
                                           int eight) {
    const int lane = decode::in_register(threadIdx.x % 32);
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
        for (int n = 0; n < COUNT / 2; ++n) {
            unsigned value[4];
            load_transposed_matrices(value, values + offset_of<Its::SIZE>(16 * k + lane % 16, eight + 2 * n + lane / 16));
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                if (BEGINS && k == 0) {
                    multiply_alone(sum[m][2 * n], weight[m][k], value[0], value[1], T());
                    multiply_alone(sum[m][2 * n + 1], weight[m][k], value[2], value[3], T());
                    continue;
                }
                multiply<T>(sum[m][2 * n], weight[m][k], value[0], value[1]);
                multiply<T>(sum[m][2 * n + 1], weight[m][k], value[2], value[3]);
            }
        }
}

template <int TILES, int EIGHTS> __device__ __forceinline__ void clear(float (&sum)[TILES][EIGHTS][4]) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n) sum[m][n][0] = sum[m][n][1] = sum[m][n][2] = sum[m][n][3] = 0.f;
}

template <int TILES, int EIGHTS>
__device__ __forceinline__ void multiply_all(float (&sum)[TILES][EIGHTS][4], const float (&factor)[TILES][2]) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[m][n][i] *= factor[m][i / 2];
}

// Adds sums of a span, those of eights from number `first` on, to those of all.
template <int TILES, int EIGHTS, int ALL>
__device__ __forceinline__ void add_sums(float (&whole)[TILES][ALL][4], const float (&sum)[TILES][EIGHTS][4],
                                         const float2 (&factors)[TILES][2], int first) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) add_part(whole[m][first + n][i], sum[m][n][i], factors[m][i / 2]);
}

// A span has become whole: its state is merged with those before.
template <int TILES, int COLUMNS, bool SPANS>
__device__ __forceinline__ void merge_totals(Sums<TILES, COLUMNS, SPANS>& sums, float2 (&factors)[TILES][2],
                                             const float (&total)[TILES][4]) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            factors[m][half] = next_maximum(sums.whole_maximum[m][half], sums.maximum[m][half]);
            const float own = INT8 ? sum_of_row(total[m][2 * half]) : total[m][2 * half];
            add_part(sums.whole_total[m][half], own, factors[m][half]);
        }
}

// Takes a tile whose scores are there: to the sums of its span, and with its last tile to those of all.
template <typename T, typename Its, int TILES, int COLUMNS, bool SPANS>
__device__ __forceinline__ void add_tile(Sums<TILES, COLUMNS, SPANS>& sums, Weights<TILES>& weight, float (&total)[TILES][4],
                                         const float (&correction)[TILES][2], unsigned values, int column, bool is_first,
                                         bool is_last) {
    float2 factors[TILES][2];
    add_weights<T>(total, weight);
    if constexpr (!SPANS) {
        merge_totals(sums, factors, total);
#pragma unroll
        for (int first = 0; first < COLUMNS / 8; first += CHUNK / 8) {
            float part[TILES][CHUNK / 8][4];
            add_values<T, Its, true>(part, weight, values, column / 8 + first);
            add_sums(sums.whole, part, factors, first);
        }
    } else {
        bool changes = false;
#pragma unroll
        for (int m = 0; m < TILES; ++m) changes |= correction[m][0] != 1.f || correction[m][1] != 1.f;
        if (is_first) clear(sums.sum);
        else if (__any_sync(FULL_WARP, changes)) multiply_all(sums.sum, correction);
        add_values<T, Its, false>(sums.sum, weight, values, column / 8);
#pragma unroll
        for (int m = 0; m < TILES; ++m) sums.total[m][0] = total[m][0], sums.total[m][1] = total[m][2];
        if (!is_last) return;
        merge_totals(sums, factors, total);
        add_sums(sums.whole, sums.sum, factors, 0);
    }
}

// The results of those rows whose spans have 2^bits tiles; the first query is `row` of the block's.
template <typename T, typename Its, int TILES, int COLUMNS, bool SPANS>
__device__ __forceinline__ void write_results(const Sums<TILES, COLUMNS, SPANS>& sums, const Block<T, Its>& block, int row,
                                              int column, int bits) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int own = row + 16 * m + 8 * half + threadIdx.x % 32 / 4, token = block.first_token + own;
            if (token >= block.tokens || block.bits_of(own) != bits) continue;
            const float inverse = 1.f / sums.whole_total[m][half];
            const size_t place = static_cast<size_t>(block.sequence) * block.tokens + token;
            T* const context = reinterpret_cast<T*>(block.arguments.context) + place * block.arguments.E +
                               block.head * block.size + column;
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; ++n)
                if (column + 8 * n < block.size)
                    *reinterpret_cast<unsigned*>(context + column_of<INT8>(n)) =
                        pack<T>(neighbour<0, INT8>(sums.whole[m], n, half) * inverse,
                                neighbour<1, INT8>(sums.whole[m], n, half) * inverse);
        }
}

// Lets tiles pass by TILES of a warp's tiles of 16 queries, from number `first` on, for COLUMNS columns from `column` on and
// the rows whose spans have 2^bits tiles, where SPANS is bits > 0. `begins`: the block's queries are still on their way.
template <bool SPANS, int TILES, int COLUMNS, typename T, typename Its>
__device__ __forceinline__ void pass(const Block<T, Its>& block, int bits, int first, int column, bool begins) {
    const int row = block.warp_row + 16 * first;
    const bool works = block.exists && block.bits_of(block.warp_row) <= bits &&
                       block.bits_of(block.warp_row + 16 * Its::TILES - 1) >= bits;
    const float factor = static_cast<float>(block.arguments.scale * 1.4426950408889634);  // as decode's launcher rounds it
    Sums<TILES, COLUMNS, SPANS> sums;
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sums.whole_maximum[m][half] = LOWEST, sums.whole_total[m][half] = 0.f;
            sums.maximum[m][half] = LOWEST, sums.total[m][half] = 0.f;
        }
    }
    clear(sums.whole);
    if constexpr (SPANS) clear(sums.sum);
    auto load = [&](int tile) {
        block.template load_tile<0>(tile);
        if constexpr (Its::STAGES > 1) block.template load_tile<1>(tile);
        decode::commit_copies();
    };
    if (!begins) __syncthreads();  // no warp reads what the last pass brought
    load(block.first_tile);
#pragma unroll 1
    for (int tile = block.first_tile; tile < block.tiles; ++tile) {
        const unsigned keys = block.place_of(tile), values = keys + Its::BYTES * KEY_TILE;
        decode::wait_for_copies<0>();
        block.template expand_tile<0>(tile);
        if constexpr (Its::STAGES > 1) block.template expand_tile<1>(tile);
        __syncthreads();  // this tile is there, and what the one before had is free
        if constexpr (Its::STAGES > 1) {
            if (tile + 1 < block.tiles) load(tile + 1);
        } else {
            block.template load_tile<1>(tile);
            decode::commit_copies();
        }
        if (INT8 && begins && tile == block.first_tile)
            reorder_queries<Its::SIZE, 16 * Its::TILES>(block.queries + Its::BYTES * block.warp_row);
        const bool sees = works && tile >= block.warp_tile && tile * KEY_TILE < block.warp_end;
        const int of_span = tile & ((1 << bits) - 1);
        const bool is_first = !SPANS || of_span == 0 || tile == block.warp_tile;
        const bool is_last = !SPANS || of_span + 1 == 1 << bits || (tile + 1) * KEY_TILE >= block.warp_end;
        Scores<TILES> score;
        if (sees) {
            compute_scores<T, Its, TILES>(score, block.queries + Its::BYTES * row, keys);
            finish_scores<T, Its, TILES>(score, block, row, tile);
        }
        if constexpr (Its::STAGES == 1) {
            decode::wait_for_copies<0>();
            block.template expand_tile<1>(tile);
            __syncthreads();  // values are there, and no warp reads the keys
            if (tile + 1 < block.tiles) load(tile + 1);
        }
        if (!sees) continue;
        Weights<TILES> weight;
        float total[TILES][4], correction[TILES][2];
        weigh_rows<0, T, Its, TILES>(weight, total, correction, sums, score, block, factor, tile, is_first);
        weigh_rows<1, T, Its, TILES>(weight, total, correction, sums, score, block, factor, tile, is_first);
        add_tile<T, Its>(sums, weight, total, correction, values, column, is_first, is_last);
    }
    if (works) write_results(sums, block, row, column, bits);
}

// Grid: query heads, sequences, blocks of queries, of which the last, which see most keys, begin first.
template <typename T, int SIZE, int TILES>
__global__ void __launch_bounds__(THREADS, (Shape<SIZE, TILES>::BLOCKS))
    causal_attention(const __grid_constant__ Arguments arguments, const Division division) {
    using Its = Shape<SIZE, TILES>;
    static_assert(Its::BYTES * (Its::ROWS + 2 * Its::STAGES * KEY_TILE) + (INT8 ? 8 * Its::STAGES * KEY_TILE : 0) == HOST_BYTES,
                  "shared memory as the host counts it");
    extern __shared__ __align__(128) char memory[];
    Block<T, Its> block{arguments, division};
    block.find_place(memory);
    const size_t token = static_cast<size_t>(block.sequence) * block.tokens + block.first_token;
    const T* const source = reinterpret_cast<const T*>(arguments.queries) + token * arguments.E + block.head * block.size;
    load_rows<T, SIZE, Its::ROWS>(block.queries, source, arguments.E, block.tokens - block.first_token, block.size, 0);
    const int least = block.bits_of(0), most = block.bits_of(Its::ROWS - 1);
    bool begins = true;
#pragma unroll 1
    for (int bits = least; bits <= most; ++bits) {
        if (bits == 0) {
            pass<false, TILES, SIZE>(block, bits, 0, 0, begins);
            begins = false;
            continue;
        }
#pragma unroll 1
        for (int first = 0; first < TILES; first += Its::PASS_TILES)
#pragma unroll 1
            for (int column = 0; column < block.size; column += Its::PASS_COLUMNS) {
                pass<true, Its::PASS_TILES, Its::PASS_COLUMNS>(block, bits, first, column, begins);
                begins = false;
            }
    }
}

}  // namespace prefill
