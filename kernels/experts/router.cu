// What stands around the products of a mixture of experts: which experts a row goes through and its shares of them, and the
// sum of what they give.
#include "decode/linear.cuh"
#include "experts/addition.cuh"
#include "shared/ordered_keys.cuh"

namespace experts {

using decode::unpack8;
using decode::warp_max;
using decode::warp_sum;

constexpr unsigned FULL_WARP = decode::FULL_WARP;

// scores [rows, experts]; correction [experts] (null: none); x [rows, columns] and gate [columns] of T, of the expert that
// every row goes through (null: there is none), whose share is `shared` [rows]. Experts from `first` to before `last` have ids
// that count from the first; others' are -1, and their weights 0.
struct Choice {
    const float *scores, *correction;
    const void *x, *gate;
    int* ids;
    float *weights, *shared;
    int experts, chosen, columns, sigmoid, normalized, first, last;
    float epsilon, scale;
};
static_assert(sizeof(Choice) == HOST_CHOICE_BYTES, "as the host's structure");

// A warp chooses for a row; lane l has experts l, l + 32 and so on, EACH of them.
template <typename T, int EACH> __device__ __forceinline__ void choose_of_row(const Choice& given, int row) {
    const int lane = threadIdx.x % 32;
    const float none = __uint_as_float(0xff800000u);
    float score[EACH], largest = none;
    unsigned judged[EACH];  // keys; 0, which is none, where there is no expert
    bool is_nan = false;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int expert = i * 32 + lane;
        score[i] = expert < given.experts ? __ldcg(given.scores + static_cast<size_t>(row) * given.experts + expert) : none;
        is_nan |= score[i] != score[i];
        largest = fmaxf(largest, score[i]);
    }
    is_nan = __any_sync(FULL_WARP, is_nan);
    largest = warp_max(largest);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const bool exists = i * 32 + lane < given.experts;
        score[i] = !exists ? 0.f : given.sigmoid ? 1.f / (1.f + expf(-score[i])) : expf(score[i] - largest);
        sum += score[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int expert = i * 32 + lane;
        if (!given.sigmoid) score[i] /= sum;
        const float* correction = given.correction == nullptr || expert >= given.experts ? nullptr : given.correction + expert;
        judged[i] = expert < given.experts ? ordered_key(correction == nullptr ? score[i] : score[i] + __ldg(correction)) : 0;
    }
    unsigned chosen = 0;  // a bit for each of the lane's experts
#pragma unroll 1
    for (int number = 0; number < given.chosen; ++number) {
        unsigned best = 0;
        int own = 32 * EACH;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (!(chosen >> i & 1) && judged[i] > best) best = judged[i], own = i * 32 + lane;
        own = __reduce_min_sync(FULL_WARP, best == __reduce_max_sync(FULL_WARP, best) ? own : 32 * EACH);
        if (own % 32 == lane) chosen |= 1u << own / 32;
    }
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (chosen >> i & 1) total += score[i];
    const float divisor = warp_sum(total) + given.epsilon;
    int before = 0;  // of lower ids
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const bool is_chosen = chosen >> i & 1;
        const unsigned lanes = __ballot_sync(FULL_WARP, is_chosen);
        const int place = before + __popc(lanes & ((1u << lane) - 1));
        before += __popc(lanes);
        if (!is_chosen) continue;
        float weight = (given.normalized ? score[i] / divisor : score[i]) * given.scale;
        if (is_nan) weight = __uint_as_float(0x7fffffffu);
        const int expert = i * 32 + lane;
        const bool is_own = expert >= given.first && expert < given.last;
        given.ids[static_cast<size_t>(row) * given.chosen + place] = is_own ? expert - given.first : -1;
        given.weights[static_cast<size_t>(row) * given.chosen + place] = is_own ? weight : 0.f;
    }
    if (given.gate == nullptr) return;
    const T *x = static_cast<const T*>(given.x) + static_cast<size_t>(row) * given.columns, *gate = static_cast<const T*>(given.gate);
    float product = 0.f;
    for (int column = lane * 8; column < given.columns; column += 256) {
        float values[8], factors[8];
        unpack8<T>(__ldcg(reinterpret_cast<const uint4*>(x + column)), values);
        unpack8<T>(__ldg(reinterpret_cast<const uint4*>(gate + column)), factors);
#pragma unroll
        for (int j = 0; j < 8; ++j) product = fmaf(values[j], factors[j], product);
    }
    product = warp_sum(product);
    if (lane == 0) given.shared[row] = 1.f / (1.f + expf(-product));
}

// Of scores that are there: a warp for each row.
template <typename T, int EACH> __global__ void __launch_bounds__(32) choose(const __grid_constant__ Choice given) {
    launch_next_kernel();
    wait_for_previous_kernel();
    choose_of_row<T, EACH>(given, blockIdx.x);
}

// scores = norm(input) weight^T + bias, as decode::norm_linear computes them, and with the last of them the choice.
template <typename T, typename G, int EACH>
__global__ void __launch_bounds__(decode::THREADS, G::BLOCKS)
    route(const __grid_constant__ decode::NormLinear arguments, const __grid_constant__ Choice given, unsigned* counter) {
    const decode::FloatOutput output = decode::float_output(arguments.output, arguments.linear);
    const decode::NormInputs<T, 1> inputs = decode::one_input<T>(arguments);
    decode::multiply_normalized<T, 1, G::HELD, G, false>(inputs, arguments.linear, output, arguments.next_early != 0);
    if (!comes_last(counter, gridDim.x)) return;
    for (int row = threadIdx.x / 32; row < arguments.linear.batch; row += decode::SLICES) choose_of_row<T, EACH>(given, row);
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
