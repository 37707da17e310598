// What stands around the products of a mixture of experts: which experts a row goes through and its shares of them, by what the
// router gave, and the sum of what they give.
#include "experts/addition.cuh"
#include "shared/ordered_keys.cuh"

namespace experts {

using decode::FULL_WARP;

// scores [rows, experts]; correction [experts] (null: none); x [rows, columns] and gate [columns] of T, of the expert that
// every row goes through (null: there is none); scales [experts] of weights (null: 1). Experts from `first` to before
// `last` have ids that count from the first; others' are -1, and their weights 0. next_early: see NormLinear.
struct Choice {
    const float *scores, *correction;
    const void *x, *gate;
    const float* scales;
    int experts, chosen, columns, sigmoid, normalized, first, last, next_early;
    float epsilon, scale;
};
static_assert(sizeof(Choice) == HOST_CHOICE_BYTES, "as the host's structure");

// Divides by what is 1 or more, and no infinity, and rounds as division does (Markstein 1990), without the branch for what is too
// small for that.
template <int EACH> __device__ __forceinline__ void divide(float (&values)[EACH], float divisor) {
    const float inverse = __frcp_rn(divisor);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        float quotient = values[i] * inverse;
#pragma unroll
        for (int j = 0; j < 2; ++j) quotient = fmaf(fmaf(-quotient, divisor, values[i]), inverse, quotient);
        values[i] = quotient;
    }
}

// A bit for each of the lane's experts that is chosen.
template <int EACH>
__device__ __forceinline__ unsigned of_best(const Choice& given, const float (&score)[EACH], const float (&added)[EACH]) {
    const int lane = threadIdx.x % 32;
    unsigned left[EACH], chosen = 0;  // keys; 0, which is none's, of what is no expert or is chosen already
    const auto begin = [&] {
#pragma unroll
        for (int i = 0; i < EACH; ++i) left[i] = i * 32 + lane < given.experts ? ordered_key(score[i] + added[i]) : 0;
    };
    const auto best_of_lane = [&] {
        unsigned best = left[0];
#pragma unroll
        for (int i = 1; i < EACH; ++i) best = max(best, left[i]);
        return best;
    };
    begin();
#pragma unroll 1
    for (int number = 0; number < given.chosen; ++number) {  // all that are equal at once
        const unsigned best = __reduce_max_sync(FULL_WARP, best_of_lane());
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (left[i] == best) left[i] = 0, chosen |= 1u << i;
    }
    if (__reduce_add_sync(FULL_WARP, __popc(chosen)) == given.chosen) return chosen;
    begin(), chosen = 0;
#pragma unroll 1
    for (int number = 0; number < given.chosen; ++number) {  // of equal ones the lower ids
        const unsigned best = best_of_lane();
        int own = 0;
#pragma unroll
        for (int i = EACH - 1; i >= 0; --i)
            if (left[i] == best) own = i * 32 + lane;
        own = __reduce_min_sync(FULL_WARP, best == __reduce_max_sync(FULL_WARP, best) ? own : 32 * EACH) - lane;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (own == i * 32) left[i] = 0, chosen |= 1u << i;
    }
    return chosen;
}

// A row's share of the expert that every row goes through, of a warp.
template <typename T> __device__ __forceinline__ float share_of_all(const Choice& given, int row) {
    const T *x = static_cast<const T*>(given.x) + static_cast<size_t>(row) * given.columns, *gate = static_cast<const T*>(given.gate);
    float product = 0.f;
    for (int column = threadIdx.x % 32 * 8; column < given.columns; column += 256) {
        float values[8], factors[8];
        decode::unpack8<T>(__ldcg(reinterpret_cast<const uint4*>(x + column)), values);
        decode::unpack8<T>(__ldg(reinterpret_cast<const uint4*>(gate + column)), factors);
#pragma unroll
        for (int j = 0; j < 8; ++j) product = fmaf(values[j], factors[j], product);
    }
    return 1.f / (1.f + expf(-decode::warp_sum(product)));
}

// A warp for each row: lane l has experts l, l + 32 and so on, EACH of them. ids and weights [rows, chosen] are in the order of ids;
// shared [rows] gets its share of the expert that every row goes through, if there is one.
template <typename T, int EACH>
__global__ void __launch_bounds__(32)
    choose(const __grid_constant__ Choice given, int* ids, float* weights, float* shared) {
    const int row = blockIdx.x, lane = threadIdx.x;
    const float none = minus_infinity();
    __shared__ int own_ids[32];
    __shared__ float own_scores[32];
    float score[EACH], added[EACH], largest = none;
    bool is_nan = false;
    if (given.next_early) launch_next_kernel();
    wait_for_previous_kernel();
    if (!given.next_early) launch_next_kernel();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int expert = i * 32 + lane;
        const bool exists = expert < given.experts;
        score[i] = exists ? __ldcg(given.scores + static_cast<size_t>(row) * given.experts + expert) : none;
        added[i] = exists && given.correction != nullptr ? __ldg(given.correction + expert) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) is_nan |= score[i] != score[i], largest = fmaxf(largest, score[i]);
    is_nan = __any_sync(FULL_WARP, is_nan);
    if (given.sigmoid) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) score[i] = 1.f / (1.f + expf(-score[i]));
    } else {
        float sum = 0.f;
        largest = key_value(__reduce_max_sync(FULL_WARP, ordered_key(largest)));
#pragma unroll
        for (int i = 0; i < EACH; ++i) score[i] = expf(score[i] - largest), sum += score[i];
        divide<EACH>(score, decode::warp_sum(sum));
    }
    const unsigned chosen = of_best<EACH>(given, score, added);
    int before = 0;  // of lower ids
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const bool is_chosen = chosen >> i & 1;
        const unsigned lanes = __ballot_sync(FULL_WARP, is_chosen);
        const int place = before + __popc(lanes & ((1u << lane) - 1)), expert = i * 32 + lane;
        before += __popc(lanes);
        if (!is_chosen) continue;
        own_ids[place] = expert >= given.first && expert < given.last ? expert - given.first : -1;
        own_scores[place] = score[i];
        total += score[i];
    }
    const float divisor = decode::warp_sum(total) + given.epsilon;
    __syncwarp();
    if (lane < given.chosen) {
        float weight = (given.normalized ? own_scores[lane] / divisor : own_scores[lane]) * given.scale;
        if (given.scales != nullptr && own_ids[lane] >= 0) weight *= __ldg(given.scales + given.first + own_ids[lane]);
        if (is_nan) weight = __uint_as_float(0x7fffffffu);
        ids[row * given.chosen + lane] = own_ids[lane];
        weights[row * given.chosen + lane] = own_ids[lane] < 0 ? 0.f : weight;
    }
    if (given.gate == nullptr) return;
    const float share = share_of_all<T>(given, row);
    if (lane == 0) shared[row] = share;
}

static_assert(sizeof(Addition) == HOST_ADDITION_BYTES, "as the host's structure");

// Of row blockIdx.y: a thread has four columns.
template <typename T> __global__ void __launch_bounds__(HOST_ADDING_THREADS) add(const __grid_constant__ Addition given) {
    const int column = (blockIdx.x * HOST_ADDING_THREADS + threadIdx.x) * 4;
    launch_next_kernel();
    wait_for_previous_kernel();
    if (column < given.width) add_four<T>(given, blockIdx.y, column);
}

}  // namespace experts
