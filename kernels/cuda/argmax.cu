#include "shared/groups.cuh"
#include "shared/ordered_keys.cuh"
#include "shared/programmatic_launch.cuh"
#include "cuda/selection.cuh"

// tokens[row] = lowest id of the largest of logits[row]; with a state (active not null) the sequences take their tokens.
// Grid (blocks of a row, rows). May be launched while the kernel before it still runs.
extern "C" __global__ void argmax(
    const float* logits, int* tokens, unsigned vocabulary, unsigned long long* best, unsigned* finished,
    const int* active, int* token_ids, int* kvcache_start_index, int* positions, int* token_counts, int* emitted_index,
    int* emitted, unsigned emitted_places) {
    wait_for_previous_kernel();
    const float* row = logits + (size_t)blockIdx.y * vocabulary;
    bool aligned = aligned_16(row);
    unsigned long long candidate = 0;
    for (unsigned group = blockIdx.x * blockDim.x + threadIdx.x; group < group_count(vocabulary);
         group += gridDim.x * blockDim.x) {
        Group values = load_group(row, vocabulary, group, aligned);
        for (unsigned i = 0; i < 4; ++i) candidate = max(candidate, value_and_id(values.value[i], 4 * group + i));
    }
    SequenceState state = {active,       token_ids,     kvcache_start_index, positions,
                           token_counts, emitted_index, emitted,             emitted_places};
    finish_row(candidate, best, finished, tokens, state, vocabulary);
}
