// What the three launches of the threshold filter share: the row's memory, its settings and its bins.
//
// 1. filter_range: the row's largest and smallest value.
// 2. filter_histogram: how many values, and how much probability, lie in each bin of distance from the maximum.
// 3. filter_select: from the histogram, the bins in which the bounds of top-k and top-p lie; their values are gathered,
//    and the row's last block selects the exact bounds among them by radix selection.
//
// All sums are of integers, so their order does not matter.
#pragma once

#include "shared/groups.cuh"
#include "shared/ordered_keys.cuh"
#include "shared/portable_math.cuh"
#include "shared/reductions.cuh"

constexpr unsigned BINS = 1024;
constexpr float BINS_PER_UNIT = 16.0f;  // of logits, at least; the last bin takes everything 64 and more below the maximum
constexpr unsigned FILTER_THREADS = BINS / 2;
constexpr unsigned LIST_CAPACITY = 4096;

// One row's memory; zeroed before the first call and again at the end of each.
struct FilterRow {
    unsigned long long weights[BINS];  // fixed-point probabilities
    unsigned counts[BINS];
    unsigned maximum;           // ordered key
    unsigned inverted_minimum;  // ~ordered key, of the values above -inf; so 0 stands for "none" here too
    unsigned finished;
    unsigned gathered[2];
    unsigned padding[3];
    float lists[2][LIST_CAPACITY];  // values in the bin of the k-th largest; values where top-p may end
};
static_assert(sizeof(FilterRow) == FILTER_ROW_BYTES, "the host allocates rows of another size");

struct FilterSettings {
    bool filters_k, filters_p, filters_min;
    unsigned top_k;
    float top_p, min_p;
};

__device__ inline FilterSettings row_settings(
    const int* top_k, const float* top_p, const float* min_p, unsigned vocabulary) {
    int k = top_k[blockIdx.y];
    float p = top_p[blockIdx.y], least = min_p[blockIdx.y];
    return {k > 0 && unsigned(k) < vocabulary, p < 1.0f, least > 0.0f, unsigned(k), p, least};
}

// How values of a row are put into bins. A narrow row has narrow bins, so that few values share one.
struct Bins {
    float maximum, per_unit;
};

__device__ inline Bins row_bins(const FilterRow& row) {
    float maximum = key_value(row.maximum), minimum = key_value(~row.inverted_minimum);
    return {maximum, fmaxf(BINS_PER_UNIT, float(BINS - 1) / (maximum - minimum))};
}

// Bin of a value, 0 for the largest; rounding is monotonic, so a larger value never has a higher bin.
__device__ inline unsigned bin_of(float value, Bins bins) {
    value = without_nan(value);
    if (value == bins.maximum) return 0;
    return unsigned(fminf((bins.maximum - value) * bins.per_unit, float(BINS - 1)));
}

// Unnormalized probability in fixed point: 2^32 at the maximum, infinite or not.
__device__ inline unsigned long long weight_of(float value, float maximum) {
    value = without_nan(value);
    if (value == maximum) return 1ull << 32;
    return fixed_point_exp(value - maximum);
}

// Adds `amount` to sums[index], in shared memory, for all lanes of a warp at once; 0 adds nothing. Where all lanes that
// add have the same index, as in a row of equal values, one of them adds for all: else they would wait in line.
template <class Amount, class Add>
__device__ inline void warp_add(unsigned index, Amount amount, Add add) {
    unsigned adding = __ballot_sync(ALL_LANES, amount != 0);
    if (adding == 0) return;
    unsigned first = __ffs(adding) - 1;
    unsigned common = __shfl_sync(ALL_LANES, index, first);
    if (__all_sync(ALL_LANES, amount == 0 || index == common)) {
        Amount total = warp_sum(amount);
        if (threadIdx.x % 32 == first) add(common, total);
    } else if (amount != 0) {
        add(index, amount);
    }
}
