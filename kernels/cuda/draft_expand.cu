#include "cuda/draft_children.cuh"
#include "shared/groups.cuh"
#include "shared/programmatic_launch.cuh"

namespace draft {

constexpr unsigned EXPAND_THREADS = 1024, EXPAND_WARPS = EXPAND_THREADS / 32;
constexpr unsigned GROUPS_A_THREAD = CHUNK / 4 / EXPAND_THREADS, VALUES_A_THREAD = 4 * GROUPS_A_THREAD;
static_assert(VALUES_A_THREAD * EXPAND_THREADS == CHUNK, "threads share a chunk evenly");

}  // namespace draft

// The best keys of each chunk of a row and the sum of its weights, for the kernel that follows (draft_children.cuh). Grid
// (chunks of the draft vocabulary, rows of all sequences), EXPAND_THREADS threads. Dynamic shared memory: the keys of `lanes`
// threads for each of top_k. The maxima of groups of `lanes` threads, at least top_k of them, bound the best keys from below,
// so few keys are left to be ranked; one warp finds the bound while the others sum. May be launched while the kernel before
// it still runs.
extern "C" __global__ void __launch_bounds__(draft::EXPAND_THREADS) draft_expand(
    const float* logits, unsigned long long* best, unsigned long long* sums, float* maxima, unsigned score_children,
    unsigned vocabulary, unsigned top_k, unsigned lanes) {
    using namespace draft;
    extern __shared__ unsigned long long gathered[];
    __shared__ unsigned long long group_maxima[EXPAND_THREADS / 4], partial[EXPAND_WARPS], bound;
    __shared__ unsigned number;
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, groups = EXPAND_THREADS / lanes;
    const float* row = logits + (size_t)blockIdx.y * vocabulary;
    size_t chunk = (size_t)blockIdx.y * gridDim.x + blockIdx.x;
    unsigned first = blockIdx.x * (CHUNK / 4) + threadIdx.x;
    if (threadIdx.x == 0) number = 0;
    launch_next_kernel();
    wait_for_previous_kernel();

    bool aligned = aligned_16(row);
    float values[VALUES_A_THREAD];
#pragma unroll
    for (unsigned i = 0; i < GROUPS_A_THREAD; ++i) {
        Group group = load_group(row, vocabulary, first + i * EXPAND_THREADS, aligned);
#pragma unroll
        for (unsigned j = 0; j < 4; ++j) values[4 * i + j] = group.value[j];
    }
    float largest = minus_infinity();
    unsigned largest_at = 0;
#pragma unroll
    for (unsigned i = 0; i < VALUES_A_THREAD; ++i) {
        if (values[i] > largest) largest = values[i], largest_at = i;  // ids ascend; NaN is never larger
    }
    auto id_of = [&](unsigned i) { return 4 * (first + i / 4 * EXPAND_THREADS) + i % 4; };
    unsigned long long own = existing_key(largest, id_of(largest_at)), maximum = own;
    if (lanes == 32) {
        maximum = warp_largest(own);
    } else {
#pragma unroll 1
        for (unsigned offset = 1; offset < lanes; offset *= 2) {
            unsigned long long other = __shfl_xor_sync(ALL_LANES, maximum, offset);
            maximum = other > maximum ? other : maximum;
        }
    }
    if (threadIdx.x % lanes == 0) group_maxima[threadIdx.x / lanes] = maximum;
    __syncthreads();

    maximum = 0;
#pragma unroll 1
    for (unsigned group = lane; group < groups; group += 32) maximum = max(maximum, group_maxima[group]);
    maximum = warp_largest(maximum);
    if (warp == 0) {
        unsigned long long own_bound = 0;
#pragma unroll 1
        for (unsigned group = lane; group < groups; group += 32) {
            unsigned long long key = group_maxima[group];
            unsigned rank = 0;
#pragma unroll 8
            for (unsigned other = 0; other < groups; ++other) rank += group_maxima[other] > key;
            if (rank == top_k - 1) own_bound = key;
        }
        own_bound = warp_largest(own_bound);
        if (lane == 0) bound = max(own_bound, 1ull);
    }
    if (score_children) {
        float reference = key_value(unsigned(maximum >> 32));
        unsigned long long sum = 0;
#pragma unroll
        for (unsigned i = 0; i < VALUES_A_THREAD; ++i) sum += softmax_weight(below_maximum(values[i], reference));
        sum = warp_sum(sum);
        if (lane == 0) partial[warp] = sum;
    }
    __syncthreads();

    if (own >= bound) {
#pragma unroll
        for (unsigned i = 0; i < VALUES_A_THREAD; ++i) {
            unsigned long long key = existing_key(values[i], id_of(i));
            if (key >= bound) gathered[atomicAdd(&number, 1u)] = key;
        }
    }
    __syncthreads();

    unsigned count = number;
    unsigned long long* target = best + chunk * top_k;
    if (warp == EXPAND_WARPS - 1 && score_children) {
        unsigned long long total = warp_sum(lane < EXPAND_WARPS ? partial[lane] : 0);
        if (lane == 0) {
            sums[chunk] = maximum == 0 ? 0 : total;
            maxima[chunk] = maximum == 0 ? minus_infinity() : key_value(unsigned(maximum >> 32));
        }
    }
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < max(count, top_k); i += EXPAND_THREADS) {
        unsigned long long key = i < count ? gathered[i] : 0;
        unsigned place = i;
        if (i < count) {
            place = 0;
#pragma unroll 4
            for (unsigned other = 0; other < count; ++other) place += gathered[other] > key;
        }
        if (place < top_k) target[place] = key;
    }
}
