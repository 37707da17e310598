#include "shared/groups.cuh"
#include "shared/ordered_keys.cuh"
#include "shared/philox.cuh"
#include "shared/portable_math.cuh"
#include "cuda/selection.cuh"

// Gumbel-max over the values that pass the row's threshold; without the noise at temperature 0. Grid and state as of
// argmax; the draw's positions are those before the sequence takes its token, which may be the state's own.
extern "C" __global__ void sample(
    const float* processed, const float* thresholds, const float* temperature, const unsigned long long* seeds,
    const int* sequences, const int* positions, int* tokens, unsigned vocabulary, unsigned long long* best,
    unsigned* finished, const int* active, int* token_ids, int* kvcache_start_index, int* state_positions,
    int* token_counts, int* emitted_index, int* emitted, unsigned emitted_places) {
    const float* row = processed + (size_t)blockIdx.y * vocabulary;
    bool aligned = aligned_16(row);
    float threshold = thresholds[blockIdx.y];
    bool greedy = temperature[blockIdx.y] == 0.0f;
    unsigned long long seed = seeds[blockIdx.y];
    uint2 key = make_uint2(unsigned(seed), unsigned(seed >> 32));
    unsigned sequence = sequences[blockIdx.y], position = positions[blockIdx.y];
    unsigned long long candidate = 0;
    for (unsigned group = blockIdx.x * blockDim.x + threadIdx.x; group < group_count(vocabulary);
         group += gridDim.x * blockDim.x) {
        Group values = load_group(row, vocabulary, group, aligned);
        bool passes[4];
        bool any = false;
        for (unsigned i = 0; i < 4; ++i) {
            values.value[i] = without_nan(values.value[i]);
            passes[i] = values.value[i] >= threshold;
            any |= passes[i];
        }
        if (!any) continue;
        unsigned word[4];
        if (!greedy) {
            uint4 words = philox_4x32(make_uint4(group, position, sequence, 0), key);
            word[0] = words.x, word[1] = words.y, word[2] = words.z, word[3] = words.w;
        }
        for (unsigned i = 0; i < 4; ++i) {
            if (!passes[i]) continue;
            float score = greedy ? values.value[i] : values.value[i] + gumbel(word[i]);
            candidate = max(candidate, value_and_id(score, 4 * group + i));
        }
    }
    SequenceState state = {active,       token_ids,     kvcache_start_index, state_positions,
                           token_counts, emitted_index, emitted,             emitted_places};
    finish_row(candidate, best, finished, tokens, state, vocabulary);
}
