// A propose step: the frontier of a level is chosen, and what the draft model reads of it is written.
#include "shared/programmatic_launch.cuh"
#include "tree/children.cuh"

namespace draft {

constexpr unsigned SELECT_THREADS = 256;
constexpr unsigned MOST_COMPARED = 512;  // keys, each with each

// The keys of scores that are already there, where the block need not put children together.
__device__ inline void read_children(
    const SequenceCandidates& candidates, const Children& children, unsigned level, unsigned top_k) {
    unsigned start = level_start(level, top_k), count = level_start(level + 1, top_k) - start;
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < count; i += TREE_THREADS) {
        children.keys[i] = existing_key(__ldcg(candidates.scores + start + i), start + i);
        children.tokens[i] = __ldcg(candidates.tokens + start + i);
    }
}

// The candidate with `rank` better ones of the level, to `chosen`, which is left as it is where there is none. By
// `SELECT_THREADS` threads.
__device__ inline void choose_candidate(
    const unsigned long long* keys, unsigned rows, unsigned top_k, unsigned rank, unsigned long long* ranked, int* chosen) {
    unsigned count = rows * top_k;
    if (count > MOST_COMPARED) {
        if (threadIdx.x >= 32) return;
        merge_lists(keys, rows, top_k, ranked);
        __syncwarp();
        if (threadIdx.x == 0 && ranked[rank] != 0) *chosen = int(key_id(ranked[rank]));
        return;
    }
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < count; i += SELECT_THREADS) {
        unsigned long long key = keys[i];
        unsigned better = 0;
#pragma unroll 4
        for (unsigned other = 0; other < count; ++other) better += keys[other] > key;
        if (better == rank && key != 0) *chosen = int(key_id(key));
    }
}

// Marks what the slot sees of the frontiers. By one thread.
__device__ inline void see_ancestors(
    unsigned char* mask_row, unsigned keys, int committed, const int* frontiers, int candidate, unsigned level,
    unsigned top_k, unsigned slot) {
    see(mask_row, keys, (long long)committed + (level - 1) * top_k + slot);
#pragma unroll 1
    for (unsigned depth = level; depth > 1 && of_level(candidate, depth, top_k); --depth) {
        slot = (unsigned(candidate) - level_start(depth, top_k)) / top_k;
        see(mask_row, keys, (long long)committed + (depth - 2) * top_k + slot);
        candidate = frontiers[(depth - 2) * top_k + slot];
    }
}

}  // namespace draft

// Puts the level's children together and writes everything that the draft model reads of one frontier slot. Grid (slots,
// sequences), TREE_THREADS threads. Dynamic shared memory: the keys of the level's children, the lists that are merged,
// the children's tokens and their parents, the frontiers of the levels before. May be launched while the kernel before it
// still runs.
template <class Compute>
__global__ void __launch_bounds__(TREE_THREADS) draft_proposal(PrepareProposalArguments a, unsigned mergers) {
    using namespace draft;
    extern __shared__ unsigned long long shared_keys[];
    __shared__ unsigned long long ranked[MAXIMUM_TOP_K];
    __shared__ int chosen;
    launch_next_kernel();
    unsigned top_k = gridDim.x, slot = blockIdx.x, level = a.level.number, width = a.level.width, keys = a.L;
    bool select = a.level.dynamic;
    size_t sequence = blockIdx.y, place = sequence * top_k + slot;
    SequenceCandidates candidates = of_sequence(a.candidates, sequence, a.C, a.F, top_k);
    Merge merge = merge_of(a.expansion, a.level, candidates, a.U, top_k, mergers);
    unsigned rows = merge.rows(), count = rows * top_k, chunks = merge.results.chunks;
    unsigned long long* lists = shared_keys + count;
    int* integers = reinterpret_cast<int*>(lists + mergers * chunks * width);
    Children children = {shared_keys, integers, integers + count};
    int* earlier = children.parents + rows;
    unsigned char* mask_row = a.inputs.attention_mask + place * keys;
    wait_for_previous_kernel();

    int length = __ldcg(a.committed + sequence);
    int* entry = candidates.frontiers + (level - 1) * top_k + slot;
    if (threadIdx.x == 0) chosen = select ? -1 : __ldcg(entry);
    unsigned row_thread = TREE_THREADS - 1 - threadIdx.x;
    if (row_thread < MASK_THREADS) {
#pragma unroll 1
        for (unsigned i = row_thread; i < (level - 1) * top_k; i += MASK_THREADS) {
            earlier[i] = __ldcg(candidates.frontiers + i);
        }
        write_mask_row(mask_row, keys, (long long)length - 1, row_thread, MASK_THREADS);
        long long position = (long long)length + level - 1 + __ldcg(a.tables.position_offsets + sequence);
        Compute* rotary_row = reinterpret_cast<Compute*>(a.inputs.rope_rotary_cos_sin) + place * a.R;
        write_rotary_row(a.tables.rotary, position, rotary_row, a.P, a.R, row_thread, MASK_THREADS);
    }
    if (chunks == 0) {
        read_children(candidates, children, level, top_k);
    } else {
        finish_children(merge, children, lists);
    }
    __syncthreads();
    if (threadIdx.x < SELECT_THREADS) {
        if (select && slot < width) choose_candidate(children.keys, rows, top_k, slot, ranked, &chosen);
    } else if (chunks != 0) {
        map_tokens(merge, children, slot, 1, threadIdx.x - SELECT_THREADS, TREE_THREADS - SELECT_THREADS);
    }
    __syncthreads();
    int candidate = chosen;
    bool valid = of_level(candidate, level, top_k);
    unsigned child = valid ? candidate - level_start(level, top_k) : 0;
    unsigned parent_slot = level == 1 ? 0 : child / top_k;
    int token = valid ? children.tokens[child] : -1;
    if (threadIdx.x == TREE_THREADS - 1) {
        see_ancestors(mask_row, keys, length, earlier, candidate, level, top_k, slot);
        if (select) *entry = candidate;
        if (slot == 0) a.inputs.kvcache_start_index[sequence] = length + int((level - 1) * top_k);
    }
    constexpr unsigned HALF = TREE_THREADS / 2;
    if (threadIdx.x < HALF) {
        char* target = a.inputs.inputs_embeds + place * a.H * sizeof(Compute);
        look_up<Compute>(a.tables.embedding, token, target, a.V, a.H, HALF);
    } else {
        size_t row_bytes = a.G * sizeof(Compute);
        const char* hidden = a.hidden.put_out + (sequence * a.n + parent_slot) * row_bytes;
        copy_fresh_row(a.hidden.fed + place * row_bytes, hidden, row_bytes, threadIdx.x - HALF, HALF);
    }
}
