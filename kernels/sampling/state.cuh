// How a chosen token changes what decoding knows of its sequence, and the end of the kernels that choose one of each row.
#pragma once

#include "sampling/arguments.cuh"
#include "shared/last_of.cuh"
#include "shared/reductions.cuh"

// One sequence's state as it was before its token was known: read ahead of time, since every read takes a while, and
// from the second-level cache, as a kernel that overlaps its predecessor must.
struct SequenceRow {
    bool active;
    int start_index, position, emitted_index;
};

__device__ inline SequenceRow read_row(const SequenceState& state, unsigned row) {
    return {__ldcg(state.active + row) == 1, __ldcg(state.kvcache_start_index + row), __ldcg(state.positions + row),
            __ldcg(state.emitted_index + row)};
}

// An active sequence takes the token as its next input; an idle one emits -1.
__device__ inline void take_token(
    const SequenceState& state, const SequenceRow& before, unsigned row, int token, unsigned vocabulary,
    unsigned emitted_places) {
    int place = before.emitted_index;
    state.emitted[(size_t)row * emitted_places + place] = before.active ? token : -1;
    state.emitted_index[row] = unsigned(place) + 1 < emitted_places ? place + 1 : 0;
    if (!before.active) return;
    state.token_ids[row] = token;
    state.kvcache_start_index[row] = before.start_index + 1;
    state.positions[row] = before.position + 1;
    if (unsigned(token) < vocabulary) atomicAdd(state.token_counts + (size_t)row * vocabulary + token, 1);
}

// Write the token of the row's best `value_and_id` (see there), 0 where no block has any, and let the row's sequence take
// it where there is a state. `best` and `finished` hold one word for each row, are 0 before and 0 again afterwards.
__device__ inline void choose_token(
    unsigned long long candidate, unsigned long long* best, unsigned* finished, int* tokens, const SequenceState& state,
    unsigned vocabulary, unsigned emitted_places) {
    __shared__ unsigned long long partial[MAXIMUM_WARPS];
    unsigned row = blockIdx.y;
    SequenceRow before{};
    if (threadIdx.x == 0 && state.active != nullptr) before = read_row(state, row);
    candidate = block_maximum(candidate, partial);
    if (threadIdx.x != 0) return;
    atomicMax(best + row, candidate);
    if (!last_of(finished + row, gridDim.x)) return;
    unsigned long long winner = atomicExch(best + row, 0ull);
    int token = winner == 0 ? 0 : int(0xffffffffu - unsigned(winner));
    tokens[row] = token;
    if (state.active != nullptr) take_token(state, before, row, token, vocabulary, emitted_places);
}
