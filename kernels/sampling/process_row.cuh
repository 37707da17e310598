// Penalties and temperature of one row of logits, spread over the blocks of a row (blockIdx.x).
#pragma once

#include "sampling/arguments.cuh"
#include "shared/groups.cuh"

constexpr int COUNT_BITS = IN_PROMPT - 1;

struct LogitSettings {
    float repetition, presence, frequency, temperature;
    __device__ bool penalizes() const { return repetition != 1.0f || presence != 0.0f || frequency != 0.0f; }
};

__device__ inline LogitSettings logit_settings(const SamplingRecord& record) {
    return {record.repetition_penalty, record.presence_penalty, record.frequency_penalty, record.temperature};
}

// A token seen in the prompt or generated; `seen` is its count as of Kernels.process_logits, not 0.
__device__ inline float penalized(float value, int seen, const LogitSettings& settings) {
    value = value > 0.0f ? value / settings.repetition : value * settings.repetition;
    int generated = seen & COUNT_BITS;
    value = value - (generated > 0 ? settings.presence : 0.0f);
    return value - settings.frequency * __int2float_rn(generated);
}

// Counts as they stand in memory.
struct RowCounts {
    const int* counts;
    __device__ void raise(unsigned, int (&)[4]) const {}
};

// `target` may be `source`. `counts` has `counts` [vocabulary] and raise(group, counts of the group's four tokens).
template <class Counts>
__device__ inline void process_row(
    const float* source, float* target, const Counts& counts, const LogitSettings& settings, unsigned vocabulary) {
    bool penalizes = settings.penalizes();
    float divisor = settings.temperature == 0.0f ? 1.0f : settings.temperature;
    if (!penalizes && divisor == 1.0f && source == target) return;
    bool aligned = aligned_16(source) && aligned_16(target) && aligned_16(counts.counts);
    for (unsigned group = blockIdx.x * blockDim.x + threadIdx.x; group < group_count(vocabulary);
         group += gridDim.x * blockDim.x) {
        unsigned id = 4 * group;
        bool whole = aligned && id + 4 <= vocabulary;
        Group values = load_group(source, vocabulary, group, aligned);
        if (penalizes) {
            int seen[4];
            if (whole) {
                int4 loaded = *reinterpret_cast<const int4*>(counts.counts + id);
                seen[0] = loaded.x, seen[1] = loaded.y, seen[2] = loaded.z, seen[3] = loaded.w;
            } else {
                for (unsigned i = 0; i < 4; ++i) seen[i] = id + i < vocabulary ? counts.counts[id + i] : 0;
            }
            counts.raise(group, seen);
            for (unsigned i = 0; i < 4; ++i) {
                if (seen[i] != 0) values.value[i] = penalized(values.value[i], seen[i], settings);
            }
        }
        if (divisor != 1.0f) {
            for (unsigned i = 0; i < 4; ++i) values.value[i] = values.value[i] / divisor;
        }
        if (whole) {
            *reinterpret_cast<float4*>(target + id) =
                make_float4(values.value[0], values.value[1], values.value[2], values.value[3]);
        } else {
            for (unsigned i = 0; i < 4; ++i) {
                if (id + i < vocabulary) target[id + i] = values.value[i];
            }
        }
    }
}
