// The finish of kernels that choose a token of each row of the vocabulary, several blocks a row.
#pragma once

#include "shared/reductions.cuh"
#include "cuda/state.cuh"

// Write the token of the row's best `value_and_id` (see there), 0 where no block has any, and let the row's sequence take
// it where there is a state. `best` and `finished` hold one word for each row, are 0 before and 0 again afterwards.
__device__ inline void finish_row(
    unsigned long long candidate, unsigned long long* best, unsigned* finished, int* tokens, const SequenceState& state,
    unsigned vocabulary) {
    __shared__ unsigned long long partial[MAXIMUM_WARPS];
    unsigned row = blockIdx.y;
    SequenceRow before{};
    if (threadIdx.x == 0 && state.active != nullptr) before = read_row(state, row);
    candidate = block_maximum(candidate, partial);
    if (threadIdx.x != 0) return;
    atomicMax(best + row, candidate);
    if (!last_block_of_row(finished + row)) return;
    unsigned long long winner = atomicExch(best + row, 0ull);
    int token = winner == 0 ? 0 : int(0xffffffffu - unsigned(winner));
    tokens[row] = token;
    if (state.active != nullptr) take_token(state, before, row, token, vocabulary);
}
