// Distributions of rows of processed logits in fixed point, as of distribution.py.
#pragma once

#include "acceptance/acceptance.cuh"
#include "shared/groups.cuh"
#include "shared/philox.cuh"
#include "shared/portable_math.cuh"

namespace acceptance {

// Softmax of a row restricted to values >= threshold; at temperature 0 its argmax.
struct Distribution {
    const float* values;
    float threshold, maximum, total;
    unsigned best_id;
    bool greedy;

    // Unnormalized, in fixed point. Of temperatures above 0.
    __device__ unsigned long long weight(float value) const {
        return without_nan(value) >= threshold ? weight_of(value, maximum) : 0;
    }

    __device__ float probability(float value, unsigned id) const {
        if (greedy) return id == best_id ? 1.0f : 0.0f;
        return __ull2float_rn(weight(value)) / total;
    }

    __device__ bool may_be_drawn(float value, unsigned id) const {
        return greedy ? id == best_id : without_nan(value) >= threshold;
    }
};

// The distribution of a row whose best and total are known.
__device__ inline Distribution row_distribution(const float* values, float threshold, float temperature, const Row& row) {
    unsigned long long best = __ldcg(&row.best), total = __ldcg(&row.total);
    float divisor = __ull2float_rn(total == 0 ? 1 : total);
    return {values, threshold, key_value(unsigned(best >> 32)), divisor, unsigned(winning_id(best)), temperature == 0.0f};
}

// A request's random words for one draw.
struct DrawWords {
    uint2 key;
    unsigned sequence, position;

    __device__ uint4 words(unsigned group, unsigned stream) const {
        return philox_4x32(make_uint4(group, position, sequence, stream), key);
    }
};

__device__ inline DrawWords draw_words(const SamplingRecord& record, int position) {
    return {make_uint2(unsigned(record.seed), unsigned(record.seed >> 32)), unsigned(record.sequence), unsigned(position)};
}

__device__ inline unsigned word_of(const uint4& words, unsigned place) {
    return place == 0 ? words.x : place == 1 ? words.y : place == 2 ? words.z : words.w;
}

}  // namespace acceptance
