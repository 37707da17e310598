// How the children of a frontier come about: draft_expand leaves the best keys and the sum of each chunk of each row, and
// the kernel that follows puts the chunks together, every block for itself.
#pragma once

#include "draft_tree.cuh"
#include "log_softmax.cuh"
#include "programmatic_launch.cuh"
#include "reductions.cuh"

namespace draft {

constexpr unsigned MASK_THREADS = 128;  // that write the mask and the rotary row while others merge

// The largest of a warp's keys (0: none), in all lanes.
__device__ inline unsigned long long warp_largest(unsigned long long key) {
    unsigned upper = __reduce_max_sync(ALL_LANES, unsigned(key >> 32));
    unsigned lower = __reduce_max_sync(ALL_LANES, unsigned(key >> 32) == upper ? unsigned(key) : 0);
    return (unsigned long long)upper << 32 | lower;
}

// The `top_k` (up to 64) largest keys of all of `count` lists of `top_k` keys, each descending with 0 at its end and no key
// twice: lane r gets those at places r and r + 32. By one warp.
struct Ranked {
    unsigned long long key[2];
};

__device__ __noinline__ Ranked merge_lists(const unsigned long long* lists, unsigned count, unsigned top_k) {
    unsigned lane = threadIdx.x % 32, taken = 0, shift_of_head = 0;  // 8 bits of `taken` for each of the lane's lists
    unsigned long long head = 0;
    Ranked ranked = {{0, 0}};
    bool moves = true;
#pragma unroll 1
    for (unsigned place = 0; place < top_k; ++place) {
        if (moves) {
            head = 0;
#pragma unroll 1
            for (unsigned list = lane, shift = 0; list < count; list += 32, shift += 8) {
                unsigned next = taken >> shift & 255;
                unsigned long long key = next < top_k ? lists[list * top_k + next] : 0;
                if (key > head) head = key, shift_of_head = shift;
            }
        }
        unsigned long long best = warp_largest(head);
        if (place == lane) ranked.key[0] = best;
        if (place == lane + 32) ranked.key[1] = best;
        moves = head == best && best != 0;
        if (moves) taken += 1u << shift_of_head;
    }
    return ranked;
}

// What draft_expand left, and how it becomes candidates of `level`: `chunks` of each of a sequence's `rows`.
struct Expansion {
    const unsigned long long* best;  // [sequences, rows, chunks, top_k]
    const unsigned long long* sums;  // [sequences, rows, chunks]
    const float* maxima;             // [sequences, rows, chunks]
    const int* draft_to_target;
    unsigned chunks, score_children, draft_vocabulary, mergers;  // no chunks: the candidates are there already
};

// The candidates of one sequence, and the frontiers that they come from.
struct Candidates {
    int* tokens;
    float* scores;
    int* parents;
    const int* frontiers;  // [levels, top_k]
};

// The level's candidates in shared memory, `top_k` of each row.
struct Children {
    unsigned long long* keys;  // of score and index
    int* tokens;
};

__device__ inline int parent_of_row(const Candidates& candidates, unsigned level, unsigned top_k, unsigned row) {
    return level == 1 ? -1 : __ldcg(candidates.frontiers + (level - 2) * top_k + row);
}

// Brings constants near before the kernel waits for the previous one: blocks share the work.
__device__ inline void prefetch_mapping(const Expansion& expansion, unsigned block, unsigned blocks) {
    if (expansion.chunks == 0) return;
    unsigned lines = (expansion.draft_vocabulary + 31) / 32;
#pragma unroll 1
    for (unsigned line = block * blockDim.x + threadIdx.x; line < lines; line += blocks * blockDim.x) {
        prefetch_line(expansion.draft_to_target + 32 * line);
    }
}

// Puts the chunks of one row together, by one warp. `lists` is shared memory for the row's keys.
__device__ inline void finish_row(
    const Expansion& expansion, const Candidates& candidates, const Children& children, size_t sequence, unsigned row,
    unsigned rows, unsigned level, unsigned top_k, unsigned long long* lists) {
    unsigned lane = threadIdx.x % 32, chunks = expansion.chunks;
    size_t first = (sequence * rows + row) * chunks;
#pragma unroll 2
    for (unsigned i = lane; i < chunks * top_k; i += 32) lists[i] = __ldcg(expansion.best + first * top_k + i);
    int parent = parent_of_row(candidates, level, top_k, row);
    float parent_score = level == 1 ? 0.0f : minus_infinity();
    if (level > 1 && of_level(parent, level - 1, top_k)) parent_score = __ldcg(candidates.scores + parent);
    float maximum = minus_infinity(), log_sum = 0.0f;
    if (expansion.score_children) {
#pragma unroll 1
        for (unsigned i = lane; i < chunks; i += 32) maximum = fmaxf(maximum, __ldcg(expansion.maxima + first + i));
        maximum = key_value(__reduce_max_sync(ALL_LANES, ordered_key(maximum)));
        unsigned long long total = 0;
#pragma unroll 1
        for (unsigned i = lane; i < chunks; i += 32) {
            total += scaled_sum(__ldcg(expansion.sums + first + i), __ldcg(expansion.maxima + first + i), maximum);
        }
        log_sum = log_of_sum(warp_sum(total));
    }
    __syncwarp();
    Ranked ranked = merge_lists(lists, chunks, top_k);
#pragma unroll 1
    for (unsigned place = lane; place < top_k; place += 32) {
        unsigned child = row * top_k + place;
        unsigned long long key = place < 32 ? ranked.key[0] : ranked.key[1];
        float value = key_value(unsigned(key >> 32));
        float score = parent_score + (expansion.score_children ? below_maximum(value, maximum) - log_sum : 0.0f);
        bool exists = key != 0 && score > minus_infinity();
        children.keys[child] = exists ? value_and_id(score, level_start(level, top_k) + child) : 0;
        children.tokens[child] = exists ? expansion.draft_to_target[key_id(key)] : -1;
    }
    __syncwarp();  // before the lists are those of the next row
}

// All children of the sequence's frontier; every warp calls it, the block synchronizes afterwards.
__device__ inline void finish_children(
    const Expansion& expansion, const Candidates& candidates, const Children& children, size_t sequence, unsigned level,
    unsigned top_k, unsigned long long* lists) {
    unsigned warp = threadIdx.x / 32, rows = level == 1 ? 1 : top_k;
    if (warp >= expansion.mergers) return;
    lists += warp * expansion.chunks * top_k;
#pragma unroll 1
    for (unsigned row = warp; row < rows; row += expansion.mergers) {
        finish_row(expansion, candidates, children, sequence, row, rows, level, top_k, lists);
    }
}

// Some of the children to the candidates.
__device__ inline void write_children(
    const Candidates& candidates, const Children& children, unsigned level, unsigned top_k, unsigned first,
    unsigned count, unsigned thread, unsigned threads) {
#pragma unroll 1
    for (unsigned child = first + thread; child < first + count; child += threads) {
        unsigned long long key = children.keys[child];
        unsigned candidate = level_start(level, top_k) + child;
        candidates.tokens[candidate] = children.tokens[child];
        candidates.scores[candidate] = key == 0 ? minus_infinity() : key_value(unsigned(key >> 32));
        candidates.parents[candidate] = key == 0 ? -1 : parent_of_row(candidates, level, top_k, child / top_k);
    }
}

}  // namespace draft
