// What decoding knows of each sequence, and how a chosen token changes it.
#pragma once

struct SequenceState {
    const int* active;
    int* token_ids;
    int* kvcache_start_index;
    int* positions;
    int* token_counts;
    int* emitted_index;
    int* emitted;
    unsigned emitted_places;
};

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
    const SequenceState& state, const SequenceRow& before, unsigned row, int token, unsigned vocabulary) {
    int place = before.emitted_index;
    state.emitted[(size_t)row * state.emitted_places + place] = before.active ? token : -1;
    state.emitted_index[row] = unsigned(place) + 1 < state.emitted_places ? place + 1 : 0;
    if (!before.active) return;
    state.token_ids[row] = token;
    state.kvcache_start_index[row] = before.start_index + 1;
    state.positions[row] = before.position + 1;
    if (unsigned(token) < vocabulary) atomicAdd(state.token_counts + (size_t)row * vocabulary + token, 1);
}
