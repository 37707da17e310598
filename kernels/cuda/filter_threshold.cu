#include "filter_workspace.cuh"

// First launch. Grid of all three: (blocks of a row, rows), FILTER_THREADS threads.
extern "C" __global__ void filter_maximum(
    const float* processed, const int* top_k, const float* top_p, const float* min_p, FilterRow* rows,
    unsigned vocabulary) {
    __shared__ unsigned partial[MAXIMUM_WARPS];
    FilterSettings settings = row_settings(top_k, top_p, min_p, vocabulary);
    if (!settings.filters_k && !settings.filters_p && !settings.filters_min) return;
    const float* row = processed + (size_t)blockIdx.y * vocabulary;
    bool aligned = aligned_16(row);
    unsigned maximum = 0;
    for (unsigned group = blockIdx.x * blockDim.x + threadIdx.x; group < group_count(vocabulary);
         group += gridDim.x * blockDim.x) {
        Group values = load_group(row, vocabulary, group, aligned);
        for (unsigned i = 0; i < 4; ++i) maximum = max(maximum, ordered_key(values.value[i]));
    }
    maximum = block_maximum(maximum, partial);
    if (threadIdx.x == 0) atomicMax(&rows[blockIdx.y].maximum, maximum);
}

// Second launch.
extern "C" __global__ void filter_histogram(
    const float* processed, const int* top_k, const float* top_p, const float* min_p, FilterRow* rows,
    unsigned vocabulary) {
    __shared__ unsigned long long weights[BINS];
    __shared__ unsigned counts[BINS];
    FilterSettings settings = row_settings(top_k, top_p, min_p, vocabulary);
    if (!settings.filters_k && !settings.filters_p) return;
    for (unsigned bin = threadIdx.x; bin < BINS; bin += blockDim.x) weights[bin] = 0, counts[bin] = 0;
    __syncthreads();
    FilterRow& shared_row = rows[blockIdx.y];
    float maximum = key_value(shared_row.maximum);
    const float* row = processed + (size_t)blockIdx.y * vocabulary;
    bool aligned = aligned_16(row);
    unsigned groups = group_count(vocabulary);
    for (unsigned start = blockIdx.x * blockDim.x; start < groups; start += gridDim.x * blockDim.x) {
        unsigned group = start + threadIdx.x;  // beyond the end in the last warps, which must stay whole
        Group values = load_group(row, vocabulary, group, aligned);
        for (unsigned i = 0; i < 4; ++i) {
            bool valid = 4 * group + i < vocabulary;
            unsigned bin = bin_of(values.value[i], maximum);
            warp_add(counts, bin, valid ? 1u : 0u);
            if (settings.filters_p) warp_add(weights, bin, valid ? weight_of(values.value[i], maximum) : 0ull);
        }
    }
    __syncthreads();
    for (unsigned bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        if (counts[bin] != 0) atomicAdd(shared_row.counts + bin, counts[bin]);
        if (weights[bin] != 0) atomicAdd(shared_row.weights + bin, weights[bin]);
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

// The largest key for which the values in `range` whose key is no less, and everything before the range, together reach
// `needed`: in number, or in probability if Weighted. Radix selection, eight bits a pass.
template <bool Weighted>
__device__ inline unsigned select_key(
    Source source, BinRange range, float maximum, unsigned long long needed, unsigned long long* digits) {
    __shared__ unsigned chosen_digit;
    __shared__ unsigned long long sum_before;
    unsigned long long before = range.before;
    unsigned prefix = 0, decided = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) digits[threadIdx.x] = 0;
        __syncthreads();
        for (unsigned start = 0; start < source.count; start += blockDim.x) {
            unsigned i = start + threadIdx.x, key = 0;
            unsigned long long amount = 0;
            if (i < source.count) {
                float value = __ldcg(source.values + i);
                unsigned bin = bin_of(value, maximum);
                key = ordered_key(value);
                if (bin >= range.first && bin <= range.last && (key & decided) == prefix) {
                    amount = Weighted ? weight_of(value, maximum) : 1;
                }
            }
            warp_add(digits, key >> shift & 255, amount);
        }
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
        decided |= 255u << shift;
        before = sum_before;
        __syncthreads();
    }
    return prefix;
}

// Third launch.
extern "C" __global__ void filter_select(
    const float* processed, const int* top_k, const float* top_p, const float* min_p, FilterRow* rows,
    float* thresholds, unsigned vocabulary) {
    __shared__ unsigned long long weights[BINS];  // sums up to and with each bin
    __shared__ unsigned counts[BINS];
    __shared__ unsigned long long partial[MAXIMUM_WARPS];
    __shared__ unsigned bin_k, first_p, last_p, is_last;
    FilterSettings settings = row_settings(top_k, top_p, min_p, vocabulary);
    FilterRow& shared_row = rows[blockIdx.y];
    const unsigned minus_infinity = ordered_key(__int_as_float(0xff800000));
    float maximum = key_value(shared_row.maximum);
    unsigned bound = minus_infinity;
    if (settings.filters_min) bound = ordered_key(maximum + portable_log(settings.min_p));
    if (!settings.filters_k && !settings.filters_p) {
        __syncthreads();  // all threads of block 0 have read the maximum
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            thresholds[blockIdx.y] = key_value(bound);
            shared_row.maximum = 0;
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

    const float* row = processed + (size_t)blockIdx.y * vocabulary;
    bool aligned = aligned_16(row);
    unsigned groups = group_count(vocabulary);
    for (unsigned start = blockIdx.x * blockDim.x; start < groups; start += gridDim.x * blockDim.x) {
        unsigned group = start + threadIdx.x;
        Group values = load_group(row, vocabulary, group, aligned);
        for (unsigned i = 0; i < 4; ++i) {
            bool valid = 4 * group + i < vocabulary;
            unsigned bin = bin_of(values.value[i], maximum);
            bool wanted_k = valid && settings.filters_k && bin == range_k.first;
            bool wanted_p = valid && settings.filters_p && bin >= range_p.first && bin <= range_p.last;
            append(wanted_k, values.value[i], shared_row.gathered, shared_row.lists[0]);
            append(wanted_p, values.value[i], shared_row.gathered + 1, shared_row.lists[1]);
        }
    }
    __threadfence();  // each thread makes its part of the lists visible before its block reports
    __syncthreads();
    if (threadIdx.x == 0) is_last = last_block_of_row(&shared_row.finished);
    __syncthreads();
    if (!is_last) return;

    unsigned gathered_k = __ldcg(shared_row.gathered), gathered_p = __ldcg(shared_row.gathered + 1);
    Source whole_row = {row, vocabulary};
    Source source_k = gathered_k <= LIST_CAPACITY ? Source{shared_row.lists[0], gathered_k} : whole_row;
    Source source_p = gathered_p <= LIST_CAPACITY ? Source{shared_row.lists[1], gathered_p} : whole_row;
    unsigned long long total = most;
    __shared__ unsigned long long digits[256];
    if (settings.filters_k) {
        unsigned key = select_key<false>(source_k, range_k, maximum, settings.top_k, digits);
        bound = max(bound, key);
        if (settings.filters_p) {
            unsigned long long own = 0;
            for (unsigned i = threadIdx.x; i < source_k.count; i += blockDim.x) {
                float value = __ldcg(source_k.values + i);
                if (bin_of(value, maximum) == range_k.first && ordered_key(value) >= key) {
                    own += weight_of(value, maximum);
                }
            }
            total = least + block_sum(own, partial);
        }
    }
    if (settings.filters_p) {
        unsigned long long needed = needed_weight(settings.top_p, total);
        bound = max(bound, select_key<true>(source_p, range_p, maximum, needed, digits));
    }
    shared_row.weights[pair] = 0, shared_row.weights[pair + 1] = 0;
    shared_row.counts[pair] = 0, shared_row.counts[pair + 1] = 0;
    if (threadIdx.x < 2) shared_row.gathered[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        shared_row.maximum = 0;
        thresholds[blockIdx.y] = key_value(bound);
    }
}
