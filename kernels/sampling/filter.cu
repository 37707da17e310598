// The bounds of top-k, top-p and min-p, in three launches:
//
// 1. filter_range: the row's largest and smallest value.
// 2. filter_histogram: how many values, and how much probability, lie in each bin of distance from the maximum. What is
//    -inf, as nearly all of a masked row, is left out from here on: it is below every bound that is found.
// 3. filter_select: from the histogram, the bins in which the bounds of top-k and top-p lie; their values are gathered,
//    and the row's last block selects the exact bounds among them by radix selection.
//
// All sums are of integers, so their order does not matter.
#include "sampling/arguments.cuh"
#include "shared/groups.cuh"
#include "shared/last_of.cuh"
#include "shared/ordered_keys.cuh"
#include "shared/portable_math.cuh"
#include "shared/reductions.cuh"

constexpr unsigned BINS = 1024;
constexpr float BINS_PER_UNIT = 16.0f;  // of logits, at least; the last bin takes everything 64 and more below the maximum
static_assert(ROW_THREADS == BINS / 2, "a thread has two bins");
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

__device__ inline FilterSettings row_settings(const FilterThresholdArguments& a) {
    const SamplingRecord& record = a.rows[blockIdx.y / (a.B / a.S)];
    int k = record.top_k;
    float p = record.top_p, least = record.min_p;
    return {k > 0 && unsigned(k) < a.V, p < 1.0f, least > 0.0f, unsigned(k), p, least};
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

// First launch. Grid of all three: (blocks of a row, rows), ROW_THREADS threads.
__global__ void filter_range(FilterThresholdArguments a, FilterRow* rows) {
    __shared__ unsigned partial[MAXIMUM_WARPS];
    FilterSettings settings = row_settings(a);
    if (!settings.filters_k && !settings.filters_p && !settings.filters_min) return;
    const float* row = a.processed + (size_t)blockIdx.y * a.V;
    bool aligned = aligned_16(row);
    const unsigned nothing = ordered_key(minus_infinity());
    unsigned maximum = 0, inverted_minimum = 0;
    for (unsigned group = blockIdx.x * blockDim.x + threadIdx.x; group < group_count(a.V);
         group += gridDim.x * blockDim.x) {
        Group values = load_group(row, a.V, group, aligned);
        for (unsigned i = 0; i < 4; ++i) {
            unsigned key = ordered_key(values.value[i]);
            maximum = max(maximum, key);
            if (key != nothing) inverted_minimum = max(inverted_minimum, ~key);
        }
    }
    maximum = block_maximum(maximum, partial);
    inverted_minimum = block_maximum(inverted_minimum, partial);
    if (threadIdx.x == 0) {
        atomicMax(&rows[blockIdx.y].maximum, maximum);
        atomicMax(&rows[blockIdx.y].inverted_minimum, inverted_minimum);
    }
}

// Second launch.
__global__ void filter_histogram(FilterThresholdArguments a, FilterRow* rows) {
    // Weights are summed in two halves, as shared memory adds 32 bits at once but 64 only in a loop. A block has fewer
    // than 2^16 values, so neither half overflows.
    __shared__ unsigned low_weights[BINS], high_weights[BINS], counts[BINS];
    FilterSettings settings = row_settings(a);
    if (!settings.filters_k && !settings.filters_p) return;
    for (unsigned bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        low_weights[bin] = 0, high_weights[bin] = 0, counts[bin] = 0;
    }
    __syncthreads();
    FilterRow& shared_row = rows[blockIdx.y];
    Bins bins = row_bins(shared_row);
    const float* row = a.processed + (size_t)blockIdx.y * a.V;
    bool aligned = aligned_16(row);
    unsigned groups = group_count(a.V);
    for (unsigned start = blockIdx.x * blockDim.x; start < groups; start += gridDim.x * blockDim.x) {
        unsigned group = start + threadIdx.x;  // beyond the end in the last warps, which must stay whole
        Group values = load_group(row, a.V, group, aligned);
        for (unsigned i = 0; i < 4; ++i) {
            bool valid = 4 * group + i < a.V && without_nan(values.value[i]) > minus_infinity();
            unsigned bin = bin_of(values.value[i], bins);
            warp_add(bin, valid ? 1u : 0u, [&](unsigned index, unsigned amount) {
                atomicAdd(counts + index, amount);
            });
            if (!settings.filters_p) continue;
            unsigned long long weight = valid ? weight_of(values.value[i], bins.maximum) : 0;
            warp_add(bin, weight, [&](unsigned index, unsigned long long amount) {
                atomicAdd(low_weights + index, unsigned(amount & 0xffff));
                atomicAdd(high_weights + index, unsigned(amount >> 16));
            });
        }
    }
    __syncthreads();
    for (unsigned bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        unsigned long long weight = ((unsigned long long)high_weights[bin] << 16) + low_weights[bin];
        if (counts[bin] != 0) atomicAdd(shared_row.counts + bin, counts[bin]);
        if (weight != 0) atomicAdd(shared_row.weights + bin, weight);
    }
}

// Probability that top-p must reach, of `total`; at least one token stays.
__device__ inline unsigned long long needed_weight(float top_p, unsigned long long total) {
    double needed = ceil(double(top_p) * __ull2double_rn(total));
    return needed < 1.0 ? 1ull : __double2ull_rz(needed);
}

// A range of bins, and what lies in all bins before it.
struct BinRange {
    unsigned first, last;
    unsigned long long before;
};

// The first bin up to which `sums` (inclusive, ascending) reach `needed`; `result` is shared, written by one thread.
template <class T>
__device__ inline void find_bin(const T* sums, T needed, unsigned* result) {
    for (unsigned bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        if (sums[bin] >= needed && (bin == 0 || sums[bin - 1] < needed)) *result = bin;
    }
}

// Appends the values of the lanes that want it to one of the row's lists, one atomic a warp; those beyond the capacity
// are counted only.
__device__ inline void append(bool wanted, float value, unsigned* gathered, float* list) {
    unsigned lanes = __ballot_sync(ALL_LANES, wanted);
    if (lanes == 0) return;
    unsigned lane = threadIdx.x % 32, first = __ffs(lanes) - 1;
    unsigned start = lane == first ? atomicAdd(gathered, __popc(lanes)) : 0;
    unsigned index = __shfl_sync(ALL_LANES, start, first) + __popc(lanes & ((1u << lane) - 1));
    if (wanted && index < LIST_CAPACITY) list[index] = value;
}

// Where the values of a range of bins are: its list or, if that overflowed, the whole row.
struct Source {
    const float* values;
    unsigned count;
};

// Calls take(value, whether it lies in the range) for every value of the source, by whole warps.
template <class Take>
__device__ inline void for_each_value(Source source, BinRange range, Bins bins, Take take) {
    constexpr unsigned BATCH = 4;  // values a thread loads before it looks at them
#pragma unroll 1
    for (unsigned start = 0; start < source.count; start += BATCH * blockDim.x) {
        float values[BATCH];
        for (unsigned i = 0; i < BATCH; ++i) {
            unsigned index = start + i * blockDim.x + threadIdx.x;
            values[i] = index < source.count ? __ldcg(source.values + index) : 0.0f;
        }
#pragma unroll
        for (unsigned i = 0; i < BATCH; ++i) {
            if (start + i * blockDim.x >= source.count) break;
            unsigned bin = bin_of(values[i], bins);
            bool inside = start + i * blockDim.x + threadIdx.x < source.count;
            take(values[i], inside && bin >= range.first && bin <= range.last);
        }
    }
}

// The largest key for which the values in `range` whose key is no less, and everything before the range, together reach
// `needed`: in number, or in probability if Weighted. Radix selection, eight bits a pass, from the highest bit in which
// the keys of the range differ.
template <bool Weighted>
__device__ inline unsigned select_key(Source source, BinRange range, Bins bins, unsigned long long needed) {
    __shared__ unsigned long long digits[256];
    __shared__ unsigned long long sum_before;
    __shared__ unsigned chosen_digit, any_bits, all_bits;

    if (threadIdx.x == 0) any_bits = 0, all_bits = ALL_LANES;
    __syncthreads();
    unsigned any = 0, all = ALL_LANES;
    for_each_value(source, range, bins, [&](float value, bool inside) {
        unsigned key = ordered_key(value);
        if (inside) any |= key, all &= key;
    });
    any = __reduce_or_sync(ALL_LANES, any), all = __reduce_and_sync(ALL_LANES, all);
    if (threadIdx.x % 32 == 0) atomicOr(&any_bits, any), atomicAnd(&all_bits, all);
    __syncthreads();
    unsigned undecided = ALL_LANES >> __clz(any_bits ^ all_bits);  // ones up to the highest bit that differs
    if (any_bits == all_bits) undecided = 0;
    unsigned prefix = all_bits & ~undecided;
    unsigned long long before = range.before;
    while (undecided != 0) {
        int shift = max(0, 24 - __clz(undecided));
        if (threadIdx.x < 256) digits[threadIdx.x] = 0;
        __syncthreads();
        for_each_value(source, range, bins, [&](float value, bool inside) {
            unsigned key = ordered_key(value);
            bool taken = inside && (key & ~undecided) == prefix;
            unsigned long long amount = !taken ? 0 : Weighted ? weight_of(value, bins.maximum) : 1;
            warp_add((key & undecided) >> shift, amount, [&](unsigned digit, unsigned long long sum) {
                atomicAdd(digits + digit, sum);
            });
        });
        __syncthreads();
        if (threadIdx.x < 32) {  // lane 0 takes the eight highest digits
            int top = 255 - 8 * int(threadIdx.x);
            unsigned long long own = 0;
            for (int i = 0; i < 8; ++i) own += digits[top - i];
            unsigned long long sum = before + warp_inclusive_sum(own);
            unsigned reached = __ballot_sync(ALL_LANES, sum >= needed);
            if (threadIdx.x == unsigned(__ffs(reached)) - 1) {
                unsigned long long running = sum - own;
                int digit = top;
                while (running + digits[digit] < needed) running += digits[digit--];
                chosen_digit = digit;
                sum_before = running;
            }
        }
        __syncthreads();
        prefix |= chosen_digit << shift;
        undecided = (1u << shift) - 1;
        before = sum_before;
        __syncthreads();
    }
    return prefix;
}

// Third launch.
__global__ void filter_select(FilterThresholdArguments a, FilterRow* rows) {
    __shared__ unsigned long long weights[BINS];  // sums up to and with each bin
    __shared__ unsigned counts[BINS];
    __shared__ unsigned long long partial[MAXIMUM_WARPS];
    __shared__ unsigned bin_k, first_p, last_p, is_last;
    FilterSettings settings = row_settings(a);
    FilterRow& shared_row = rows[blockIdx.y];
    Bins bins = row_bins(shared_row);
    unsigned bound = ordered_key(minus_infinity());
    if (settings.filters_min) bound = ordered_key(bins.maximum + portable_log(settings.min_p));
    if (!settings.filters_k && !settings.filters_p) {
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            a.thresholds[blockIdx.y] = key_value(bound);
            shared_row.maximum = 0, shared_row.inverted_minimum = 0;
        }
        return;
    }

    // Where the bounds lie. Two bins a thread.
    unsigned pair = 2 * threadIdx.x;
    unsigned long long weight_0 = shared_row.weights[pair], weight_1 = shared_row.weights[pair + 1];
    unsigned count_0 = shared_row.counts[pair], count_1 = shared_row.counts[pair + 1];
    unsigned long long weight_sum = block_inclusive_sum(weight_0 + weight_1, partial);
    unsigned long long count_sum = block_inclusive_sum((unsigned long long)(count_0 + count_1), partial);
    weights[pair] = weight_sum - weight_1, weights[pair + 1] = weight_sum;
    counts[pair] = unsigned(count_sum) - count_1, counts[pair + 1] = unsigned(count_sum);
    if (threadIdx.x == 0) bin_k = BINS - 1, first_p = 0, last_p = 0;
    __syncthreads();
    settings.filters_k = settings.filters_k && settings.top_k <= counts[BINS - 1];  // else all of them stay
    settings.filters_p = settings.filters_p && weights[BINS - 1] != 0;              // else there are none
    if (settings.filters_k) find_bin(counts, settings.top_k, &bin_k);
    __syncthreads();
    BinRange range_k = {bin_k, bin_k, bin_k == 0 ? 0 : counts[bin_k - 1]};
    // Before the exact k-th value is known, the probability that top-p refers to lies between these two.
    unsigned long long most = weights[bin_k];
    unsigned long long least = !settings.filters_k ? most : bin_k == 0 ? 0 : weights[bin_k - 1];
    if (settings.filters_p) {
        find_bin(weights, needed_weight(settings.top_p, least), &first_p);
        find_bin(weights, needed_weight(settings.top_p, most), &last_p);
    }
    __syncthreads();
    BinRange range_p = {first_p, last_p, first_p == 0 ? 0 : weights[first_p - 1]};

    const float* row = a.processed + (size_t)blockIdx.y * a.V;
    bool aligned = aligned_16(row);
    unsigned groups = group_count(a.V);
    for (unsigned start = blockIdx.x * blockDim.x; start < groups; start += gridDim.x * blockDim.x) {
        unsigned group = start + threadIdx.x;
        Group values = load_group(row, a.V, group, aligned);
        for (unsigned i = 0; i < 4; ++i) {
            bool valid = 4 * group + i < a.V && without_nan(values.value[i]) > minus_infinity();
            unsigned bin = bin_of(values.value[i], bins);
            bool wanted_k = valid && settings.filters_k && bin == range_k.first;
            bool wanted_p = valid && settings.filters_p && bin >= range_p.first && bin <= range_p.last;
            append(wanted_k, values.value[i], shared_row.gathered, shared_row.lists[0]);
            append(wanted_p, values.value[i], shared_row.gathered + 1, shared_row.lists[1]);
        }
    }
    __threadfence();  // each thread makes its part of the lists visible before its block reports
    __syncthreads();
    if (threadIdx.x == 0) is_last = last_of(&shared_row.finished, gridDim.x);
    __syncthreads();
    if (!is_last) return;

    unsigned gathered_k = __ldcg(shared_row.gathered), gathered_p = __ldcg(shared_row.gathered + 1);
    Source whole_row = {row, a.V};
    Source source_k = gathered_k <= LIST_CAPACITY ? Source{shared_row.lists[0], gathered_k} : whole_row;
    Source source_p = gathered_p <= LIST_CAPACITY ? Source{shared_row.lists[1], gathered_p} : whole_row;
    unsigned long long total = most;
    if (settings.filters_k) {
        unsigned key = select_key<false>(source_k, range_k, bins, settings.top_k);
        bound = max(bound, key);
        if (settings.filters_p) {
            unsigned long long own = 0;
            for (unsigned i = threadIdx.x; i < source_k.count; i += blockDim.x) {
                float value = __ldcg(source_k.values + i);
                if (bin_of(value, bins) == range_k.first && ordered_key(value) >= key) {
                    own += weight_of(value, bins.maximum);
                }
            }
            total = least + block_sum(own, partial);
        }
    }
    if (settings.filters_p) {
        unsigned long long needed = needed_weight(settings.top_p, total);
        bound = max(bound, select_key<true>(source_p, range_p, bins, needed));
    }
    shared_row.weights[pair] = 0, shared_row.weights[pair + 1] = 0;
    shared_row.counts[pair] = 0, shared_row.counts[pair + 1] = 0;
    if (threadIdx.x < 2) shared_row.gathered[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        shared_row.maximum = 0, shared_row.inverted_minimum = 0;
        a.thresholds[blockIdx.y] = key_value(bound);
    }
}
