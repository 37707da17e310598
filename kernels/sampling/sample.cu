// Drawing a token of each row: penalties and temperature, the draw itself, the counts that penalties are made from.
#include "sampling/arguments.cuh"
#include "sampling/process_row.cuh"
#include "sampling/state.cuh"
#include "shared/groups.cuh"
#include "shared/philox.cuh"
#include "shared/portable_math.cuh"

// Repetition, presence and frequency penalty of each token, then the temperature. Grid (blocks of a row, rows).
__global__ void process_logits(ProcessLogitsArguments a) {
    size_t start = (size_t)blockIdx.y * a.V;
    LogitSettings settings = logit_settings(a.rows[blockIdx.y / (a.B / a.S)]);
    process_row(a.logits + start, a.processed + start, RowCounts{a.token_counts + start}, settings, a.V);
}

// Gumbel-max over the values that pass the row's threshold; without the noise at temperature 0. Grid (blocks of a row,
// rows). The draw's positions are those before the sequence takes its token, which may be the state's own.
__global__ void sample(SampleArguments a, unsigned long long* best, unsigned* finished) {
    const SamplingRecord& record = a.rows[blockIdx.y / (a.B / a.S)];
    const float* row = a.processed + (size_t)blockIdx.y * a.V;
    bool aligned = aligned_16(row);
    float threshold = a.thresholds[blockIdx.y];
    bool greedy = record.temperature == 0.0f;
    unsigned long long seed = record.seed;
    uint2 key = make_uint2(unsigned(seed), unsigned(seed >> 32));
    unsigned sequence = record.sequence, position = a.positions[blockIdx.y];
    unsigned long long candidate = 0;
    for (unsigned group = blockIdx.x * blockDim.x + threadIdx.x; group < group_count(a.V);
         group += gridDim.x * blockDim.x) {
        Group values = load_group(row, a.V, group, aligned);
        bool passes[4];
        bool any = false;
        for (unsigned i = 0; i < 4; ++i) {
            values.value[i] = without_nan(values.value[i]);
            // Of a masked row little is left, and what is -inf is drawn only where nothing else is.
            passes[i] = values.value[i] >= threshold && values.value[i] > minus_infinity();
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
    choose_token(candidate, best, finished, a.tokens, a.state, a.V, a.E);
}

// Marks the tokens of a prompt in a cleared row of counts. Grid (blocks of tokens).
__global__ void count_tokens(CountTokensArguments a) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.N) return;
    unsigned token = a.token_ids[i];
    if (token < a.V) atomicOr(a.token_counts + token, IN_PROMPT);
}
