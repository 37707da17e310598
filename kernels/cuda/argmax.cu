#include "groups.cuh"
#include "ordered_keys.cuh"
#include "reductions.cuh"

// tokens[row] = lowest id of the largest of logits[row]. Grid (blocks of a row, rows).
extern "C" __global__ void argmax(
    const float* logits, int* tokens, unsigned vocabulary, unsigned long long* best, unsigned* finished) {
    const float* row = logits + (size_t)blockIdx.y * vocabulary;
    bool aligned = aligned_16(row);
    unsigned long long candidate = 0;
    for (unsigned group = blockIdx.x * blockDim.x + threadIdx.x; group < group_count(vocabulary);
         group += gridDim.x * blockDim.x) {
        Group values = load_group(row, vocabulary, group, aligned);
        for (unsigned i = 0; i < 4; ++i) candidate = max(candidate, value_and_id(values.value[i], 4 * group + i));
    }
    finish_row(candidate, best, finished, tokens);
}
