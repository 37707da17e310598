#include "groups.cuh"

constexpr int COUNT_BITS = 0x3fffffff;

// Repetition, presence and frequency penalty of one token, then the temperature. Grid (blocks of a row, rows).
// `processed` may be `logits`.
extern "C" __global__ void process_logits(
    const float* logits, const int* token_counts, const float* repetition_penalty, const float* presence_penalty,
    const float* frequency_penalty, const float* temperature, float* processed, unsigned vocabulary) {
    size_t start = (size_t)blockIdx.y * vocabulary;
    const float* source = logits + start;
    const int* counts = token_counts + start;
    float* target = processed + start;
    float repetition = repetition_penalty[blockIdx.y], presence = presence_penalty[blockIdx.y];
    float frequency = frequency_penalty[blockIdx.y], divisor = temperature[blockIdx.y];
    bool penalizes = repetition != 1.0f || presence != 0.0f || frequency != 0.0f;
    if (divisor == 0.0f) divisor = 1.0f;
    if (!penalizes && divisor == 1.0f && source == target) return;
    bool aligned = aligned_16(source) && aligned_16(target) && aligned_16(counts);
    for (unsigned group = blockIdx.x * blockDim.x + threadIdx.x; group < group_count(vocabulary);
         group += gridDim.x * blockDim.x) {
        unsigned id = 4 * group;
        bool whole = aligned && id + 4 <= vocabulary;
        Group values = load_group(source, vocabulary, group, aligned);
        if (penalizes) {
            int seen[4];
            if (whole) {
                int4 loaded = *reinterpret_cast<const int4*>(counts + id);
                seen[0] = loaded.x, seen[1] = loaded.y, seen[2] = loaded.z, seen[3] = loaded.w;
            } else {
                for (unsigned i = 0; i < 4; ++i) seen[i] = id + i < vocabulary ? counts[id + i] : 0;
            }
            for (unsigned i = 0; i < 4; ++i) {
                if (seen[i] == 0) continue;
                float value = values.value[i];
                value = value > 0.0f ? value / repetition : value * repetition;
                int generated = seen[i] & COUNT_BITS;
                value = value - (generated > 0 ? presence : 0.0f);
                value = value - frequency * __int2float_rn(generated);
                values.value[i] = value;
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
