#include "cuda/process_row.cuh"

// Repetition, presence and frequency penalty of one token, then the temperature. Grid (blocks of a row, rows).
// `processed` may be `logits`.
extern "C" __global__ void process_logits(
    const float* logits, const int* token_counts, const float* repetition_penalty, const float* presence_penalty,
    const float* frequency_penalty, const float* temperature, float* processed, unsigned vocabulary) {
    unsigned row = blockIdx.y;
    size_t start = (size_t)row * vocabulary;
    LogitSettings settings = {
        repetition_penalty[row], presence_penalty[row], frequency_penalty[row], temperature[row]};
    process_row(logits + start, processed + start, RowCounts{token_counts + start}, settings, vocabulary);
}
