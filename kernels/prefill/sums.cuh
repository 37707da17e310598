// Scores of a warp's queries and tiles of keys, and sums of weighted values: of a span of tiles, and of all spans.
#pragma once
#include "prefill/block.cuh"

namespace prefill {

using decode::load_matrices;
using decode::load_transposed_matrices;
using decode::multiply;
using decode::multiply_alone;

// Sums of one span's tile of 32 columns, or fewer, are added to those before at once.
constexpr int CHUNK = 32;

template <int TILES> using Scores = float[TILES][2 * BLOCKS][4];
template <int TILES> using Weights = unsigned[TILES][BLOCKS][4];

// A warp's queries, or some tiles of 16 of them, and some columns: largest scores (log2), totals and sums of the span, and of
// all spans before. Of the two rows of a lane in each tile; of spans of one tile there are no sums.
template <int TILES, int COLUMNS, bool SPANS> struct Sums {
    float whole_maximum[TILES][2], whole_total[TILES][2], whole[TILES][COLUMNS / 8][4];
    float maximum[TILES][2], total[TILES][2], sum[SPANS ? TILES : 1][SPANS ? COLUMNS / 8 : 1][4];
};

// Step `k` of 16 elements of queries, as operands.
template <typename Its, int TILES>
__device__ __forceinline__ void load_queries(unsigned (&query)[TILES][4], unsigned queries, int lane, int k) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
        load_matrices(query[m], queries + offset_of<Its::SIZE>(16 * m + lane % 16, 2 * k + lane / 16));
}

// Products of queries and a tile's keys: step `k` of 16 elements.
template <typename T, typename Its, int TILES>
__device__ __forceinline__ void add_step(Scores<TILES>& score, const unsigned (&query)[TILES][4], unsigned keys, int lane,
                                         int k) {
    const int of_part = Its::PARTS == 1 ? k : k % (Its::PART / 16);
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n) {
        unsigned key[4];
        load_matrices(key, keys + offset_of<Its::PART>(16 * n + lane % 8 + lane / 16 * 8, 2 * of_part + lane / 8 % 2));
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

// Products times the scales of a tile's keys; as scores below a cap.
template <typename T, typename Its, int TILES>
__device__ __forceinline__ void make_scores(Scores<TILES>& score, const Block<T, Its>& block, int tile) {
#pragma unroll
    for (int n = 0; n < 2 * BLOCKS; ++n) {
        const float2 two = INT8 ? block.template two_scales<0>(tile, n) : make_float2(1.f, 1.f);
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            if constexpr (INT8) {
#pragma unroll
                for (int i = 0; i < 4; ++i) score[m][n][i] *= i % 2 ? two.y : two.x;
            }
            if constexpr (CAP) cap_scores(score[m][n], block.cap, block.inverse_cap);
        }
    }
}

// Hides the scores of keys that queries do not see; the first query is `row` of the block's.
template <typename T, typename Its, int TILES>
__device__ __forceinline__ void hide_scores(Scores<TILES>& score, const Block<T, Its>& block, int row, int tile) {
    const int lane = threadIdx.x % 32, begin = tile * KEY_TILE, own = block.start + block.first_token + row;
    const bool hides = begin + KEY_TILE > block.shared_end;
    const bool leaves = WINDOW && begin <= own + 16 * TILES - 1 - block.window;
    if (!hides && !leaves) return;
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int place = 16 * m + 8 * half + lane / 4, last = AHEAD ? block.last_of(row + place) : own + place;
            attending::hide_scores(score[m], half, begin, WINDOW ? own + place - block.window : -1, last);
        }
}

// A tile's weights, what totals are with it, and what sums before are multiplied by.
template <int TILES> struct Weighed {
    unsigned weight[TILES][BLOCKS][4];
    float total[TILES][4], correction[TILES][2];
};

// Takes a tile's largest scores, before its weights are made.
template <int HALF, int TILES, typename OwnSums>
__device__ __forceinline__ void begin_weights(Weighed<TILES>& tile, OwnSums& sums, const Scores<TILES>& score, float factor,
                                              bool is_first) {
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
        const float largest = largest_score<HALF>(score[m]), before = is_first ? LOWEST : sums.maximum[m][HALF];
        const float maximum = fmaxf(before, largest * factor);
        sums.maximum[m][HALF] = maximum, tile.correction[m][HALF] = power_of_two(before - maximum);
        const float kept = is_first ? 0.f : sums.total[m][HALF] * tile.correction[m][HALF];
        tile.total[m][2 * HALF] = tile.total[m][2 * HALF + 1] = kept;
    }
}

// Makes the weights of eight keys number `n`.
template <typename T, int TILES, typename OwnSums>
__device__ __forceinline__ void weigh_eight(Weighed<TILES>& tile, const OwnSums& sums, const Scores<TILES>& score, float factor,
                                            float2 scale, int n) {
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
        weigh_two<0, INT8>(tile.weight[m], tile.total[m][0], score[m], n, factor, sums.maximum[m][0], scale, T());
        weigh_two<1, INT8>(tile.weight[m], tile.total[m][2], score[m], n, factor, sums.maximum[m][1], scale, T());
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
            load_transposed_matrices(value, values + offset_of<Its::PART>(16 * k + lane % 16, eight + 2 * n + lane / 16));
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

// Takes a tile whose weights are there: to the sums of its span, and with its last tile to those of all.
template <typename T, typename Its, int TILES, int COLUMNS, bool SPANS>
__device__ __forceinline__ void add_tile(Sums<TILES, COLUMNS, SPANS>& sums, Weighed<TILES>& tile, unsigned values, int column,
                                         bool is_first, bool is_last) {
    auto& [weight, total, correction] = tile;
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
            float inverse = 1.f / sums.whole_total[m][half];
#if HOST_SINKS
            const float sink = decode::to_float(reinterpret_cast<const T*>(block.arguments.sinks)[block.head]);
            inverse = inverse_with_sink<INT8>(sums.whole_maximum[m][half], sums.whole_total[m][half], sink);
#endif
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

}  // namespace prefill
