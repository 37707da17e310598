// Which experts a row goes through, and its shares of them, by what the router gave: a warp chooses for a row, in a launch for
// all of them or in each block that needs it, with the same bits.
#pragma once
#include "decode/common.cuh"
#include "shared/ordered_keys.cuh"

namespace experts {

using decode::FULL_WARP;

// scores [rows, experts]; correction [experts] (null: none); x [rows, columns] and gate [columns] of T, of the expert that
// every row goes through (null: there is none). Experts from `first` to before `last` have ids that count from the first;
// others' are -1, and their weights 0.
struct Choice {
    const float *scores, *correction;
    const void *x, *gate;
    int experts, chosen, columns, sigmoid, normalized, first, last;
    float epsilon, scale;
};
static_assert(sizeof(Choice) == HOST_CHOICE_BYTES, "as the host's structure");

// What a warp chooses for a row; lane l has experts l, l + 32 and so on, EACH of them.
template <int EACH> struct RowChoice {
    float score[EACH];
    unsigned chosen = 0;  // a bit for each of the lane's experts
    bool is_nan = false;

    __device__ __forceinline__ void choose(const Choice& given, int row) {
        const int lane = threadIdx.x % 32;
        const float none = minus_infinity();
        float largest = none, sum = 0.f;
        unsigned judged[EACH];  // keys; 0, which is none's, where there is no expert, or where it is chosen already
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int expert = i * 32 + lane;
            score[i] = expert < given.experts ? __ldcg(given.scores + static_cast<size_t>(row) * given.experts + expert) : none;
            is_nan |= score[i] != score[i];
            largest = fmaxf(largest, score[i]);
        }
        is_nan = __any_sync(FULL_WARP, is_nan);
        largest = key_value(__reduce_max_sync(FULL_WARP, ordered_key(largest)));
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const bool exists = i * 32 + lane < given.experts;
            score[i] = !exists ? 0.f : given.sigmoid ? 1.f / (1.f + expf(-score[i])) : expf(score[i] - largest);
            sum += score[i];
        }
        sum = decode::warp_sum(sum);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int expert = i * 32 + lane;
            if (!given.sigmoid) score[i] /= sum;
            const float* correction = given.correction == nullptr || expert >= given.experts ? nullptr : given.correction + expert;
            judged[i] = expert < given.experts ? ordered_key(correction == nullptr ? score[i] : score[i] + __ldg(correction)) : 0;
        }
#pragma unroll 1
        for (int number = 0; number < given.chosen; ++number) {
            unsigned best = judged[0];
#pragma unroll
            for (int i = 1; i < EACH; ++i) best = max(best, judged[i]);
            int own = 0;  // the lowest of the lane's best
#pragma unroll
            for (int i = EACH - 1; i >= 0; --i)
                if (judged[i] == best) own = i * 32 + lane;
            own = __reduce_min_sync(FULL_WARP, best == __reduce_max_sync(FULL_WARP, best) ? own : 32 * EACH) - lane;
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (own == i * 32) judged[i] = 0, chosen |= 1u << i;
        }
    }

    // Calls take(i, place) for each chosen one of the lane's experts; places are in the order of ids.
    template <typename Take> __device__ __forceinline__ void for_chosen(const Take& take) const {
        int before = 0;  // of lower ids
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const bool is_chosen = chosen >> i & 1;
            const unsigned lanes = __ballot_sync(FULL_WARP, is_chosen);
            if (is_chosen) take(i, before + __popc(lanes & ((1u << threadIdx.x % 32) - 1)));
            before += __popc(lanes);
        }
    }
    static __device__ int own_id(const Choice& given, int i) {
        const int expert = i * 32 + threadIdx.x % 32;
        return expert >= given.first && expert < given.last ? expert - given.first : -1;
    }
    __device__ __forceinline__ void leave_ids(const Choice& given, int* ids) const {
        for_chosen([&](int i, int place) { ids[place] = own_id(given, i); });
    }
    __device__ __forceinline__ void leave_weights(const Choice& given, float* weights) const {
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (chosen >> i & 1) total += score[i];
        const float divisor = decode::warp_sum(total) + given.epsilon;
        for_chosen([&](int i, int place) {
            float weight = (given.normalized ? score[i] / divisor : score[i]) * given.scale;
            if (is_nan) weight = __uint_as_float(0x7fffffffu);
            weights[place] = own_id(given, i) < 0 ? 0.f : weight;
        });
    }
};

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

// What rows chose, as a launch of its own left it: ids and weights [rows, chosen]; shared [rows] (null: 1).
struct Written {
    const int* ids;
    const float *weights, *shared;
    __device__ int id(int pair) const { return __ldcg(ids + pair); }
    __device__ float weight(int pair) const { return __ldcg(weights + pair); }
    __device__ float share(int row) const { return shared == nullptr ? 1.f : __ldcg(shared + row); }
};

}  // namespace experts
