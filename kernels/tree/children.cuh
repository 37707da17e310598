// How the children of a frontier come about: draft_expand leaves the best keys and the sum of each chunk of each row, and
// the kernel that follows puts the chunks together, every block for itself.
#pragma once

#include "shared/reductions.cuh"
#include "tree/levels.cuh"
#include "tree/log_softmax.cuh"

namespace draft {

constexpr unsigned MASK_THREADS = 128;  // that write the mask and the rotary row while others merge

// The largest of a warp's keys (0: none), in all lanes.
__device__ inline unsigned long long warp_largest(unsigned long long key) {
    unsigned upper = __reduce_max_sync(ALL_LANES, unsigned(key >> 32));
    unsigned lower = __reduce_max_sync(ALL_LANES, unsigned(key >> 32) == upper ? unsigned(key) : 0);
    return (unsigned long long)upper << 32 | lower;
}

// The `top_k` largest keys of all of `count` (up to 128) lists of `top_k` keys, each descending with 0 at its end and no key
// twice, to `ranked`, 0 where there are no more. By one warp; all are in shared memory.
__device__ inline void merge_lists(
    const unsigned long long* lists, unsigned count, unsigned top_k, unsigned long long* ranked) {
    unsigned lane = threadIdx.x % 32, taken = 0, shift = 0;  // 8 bits of `taken` for each of the lane's lists
    auto key_of = [&](unsigned list, unsigned place) { return place < top_k ? lists[list * top_k + place] : 0; };
    unsigned long long head = lane < count ? key_of(lane, 0) : 0;
    unsigned long long next = lane < count ? key_of(lane, 1) : 0;  // behind the head, there before it is wanted
    bool moves = count > 32;
#pragma unroll 1
    for (unsigned place = 0; place < top_k; ++place) {
        if (moves && count <= 32) {
            head = next;
            next = key_of(lane, taken + 1);
        } else if (moves) {
            head = 0;
#pragma unroll 1
            for (unsigned list = lane, own = 0; list < count; list += 32, own += 8) {
                unsigned long long key = key_of(list, taken >> own & 255);
                if (key > head) head = key, shift = own;
            }
        }
        unsigned upper = __reduce_max_sync(ALL_LANES, unsigned(head >> 32));
        bool best = unsigned(head >> 32) == upper;
        unsigned lanes = __ballot_sync(ALL_LANES, best);
        if ((lanes & (lanes - 1)) != 0) {  // equal values: the lowest id
            unsigned lower = __reduce_max_sync(ALL_LANES, best ? unsigned(head) : 0);
            best = best && unsigned(head) == lower;
        }
        if (upper == 0) best = lane == 0;  // nothing is left
        moves = best && upper != 0;
        if (best) ranked[place] = head;
        if (moves) taken += 1u << shift;
    }
}

// What draft_expand leaves in a workspace for the rows of all sequences, and how it becomes candidates of a level: the best
// of each chunk, as many as the tree is wide, then the sum and the maximum of each chunk.
struct ChunkResults {
    unsigned long long* best;  // [sequences, rows, chunks, width]
    unsigned long long* sums;  // [sequences, rows, chunks]
    float* maxima;             // [sequences, rows, chunks]
    unsigned chunks, width;
};

__device__ inline unsigned chunk_count(unsigned vocabulary) { return (vocabulary + CHUNK - 1) / CHUNK; }

__device__ inline ChunkResults chunk_results(unsigned char* workspace, size_t rows, unsigned chunks, unsigned width) {
    unsigned long long* best = reinterpret_cast<unsigned long long*>(workspace);
    unsigned long long* sums = best + rows * chunks * width;
    return {best, sums, reinterpret_cast<float*>(sums + rows * chunks), chunks, width};
}

// What puts the chunks of one sequence's rows together; the candidates are there already where there are no chunks.
struct Merge {
    ChunkResults results;
    const int* draft_to_target;
    size_t sequence;
    unsigned level, top_k, mergers;  // warps that merge
    bool scores;
    SequenceCandidates candidates;

    __device__ unsigned rows() const { return level == 1 ? 1 : top_k; }
};

// The level's candidates in shared memory, `top_k` of each row.
struct Children {
    unsigned long long* keys;  // of score and index, 0 where there is none
    int* tokens;               // ids of the draft's vocabulary, until map_tokens
    int* parents;              // of each row
};

__device__ inline Merge merge_of(
    const Expansion& expansion, const Level& level, const SequenceCandidates& candidates, unsigned vocabulary,
    unsigned top_k, unsigned mergers) {
    unsigned rows = level.number == 1 ? 1 : top_k, chunks = chunk_count(vocabulary);
    ChunkResults results = chunk_results(expansion.workspace, size_t(gridDim.y) * rows, chunks, level.width);
    return {results, expansion.draft_to_target, blockIdx.y, unsigned(level.number), top_k, mergers, level.dynamic != 0,
            candidates};
}

// Puts the chunks of one row together, by one warp. `lists` is shared memory for the row's keys. Loads come first: each
// takes longer than all that follows.
__device__ inline void finish_row(
    const Merge& merge, const Children& children, unsigned row, unsigned long long* lists) {
    constexpr unsigned AT_ONCE = 3;
    const ChunkResults& results = merge.results;
    const SequenceCandidates& candidates = merge.candidates;
    unsigned level = merge.level, top_k = merge.top_k, width = results.width;
    unsigned lane = threadIdx.x % 32, chunks = results.chunks, entries = chunks * width;
    size_t first = (merge.sequence * merge.rows() + row) * chunks;
    const unsigned long long* best = results.best + first * width;
    unsigned long long keys[AT_ONCE], sum = 0;
#pragma unroll
    for (unsigned i = 0; i < AT_ONCE; ++i) keys[i] = lane + 32 * i < entries ? __ldcg(best + lane + 32 * i) : 0;
    float own_maximum = minus_infinity();
    if (merge.scores && lane < chunks) {
        sum = __ldcg(results.sums + first + lane);
        own_maximum = __ldcg(results.maxima + first + lane);
    }
    int parent = level == 1 ? -1 : __ldcg(candidates.frontiers + (level - 2) * top_k + row);
#pragma unroll
    for (unsigned i = 0; i < AT_ONCE; ++i) {
        if (lane + 32 * i < entries) lists[lane + 32 * i] = keys[i];
    }
#pragma unroll 1
    for (unsigned i = lane + 32 * AT_ONCE; i < entries; i += 32) lists[i] = __ldcg(best + i);
    float parent_score = level == 1 ? 0.0f : minus_infinity();
    if (level > 1 && of_level(parent, level - 1, top_k)) parent_score = __ldcg(candidates.scores + parent);

    float maximum = own_maximum, log_sum = 0.0f;
    if (merge.scores) {
#pragma unroll 1
        for (unsigned i = lane + 32; i < chunks; i += 32) maximum = fmaxf(maximum, __ldcg(results.maxima + first + i));
        maximum = key_value(__reduce_max_sync(ALL_LANES, ordered_key(maximum)));
        sum = scaled_sum(sum, own_maximum, maximum);
#pragma unroll 1
        for (unsigned i = lane + 32; i < chunks; i += 32) {
            sum += scaled_sum(__ldcg(results.sums + first + i), __ldcg(results.maxima + first + i), maximum);
        }
        log_sum = log_of_sum(warp_sum(sum));
    }
    __syncwarp();
    merge_lists(lists, chunks, width, children.keys + row * top_k);
    __syncwarp();
#pragma unroll 1
    for (unsigned rank = lane; rank < top_k; rank += 32) {
        unsigned child = row * top_k + rank;
        unsigned long long key = rank < width ? children.keys[child] : 0;
        float value = key_value(unsigned(key >> 32));
        float score = parent_score + (merge.scores ? below_maximum(value, maximum) - log_sum : 0.0f);
        bool exists = key != 0 && score > minus_infinity();
        children.keys[child] = exists ? value_and_id(score, level_start(level, top_k) + child) : 0;
        children.tokens[child] = exists ? int(key_id(key)) : -1;
    }
    if (lane == 0) children.parents[row] = parent;
    __syncwarp();  // before the lists are those of the next row
}

__device__ inline int target_token(const int* draft_to_target, int id) { return id < 0 ? -1 : __ldg(draft_to_target + id); }

// All children of the sequence's frontier; every warp calls it, the block synchronizes afterwards.
__device__ inline void finish_children(const Merge& merge, const Children& children, unsigned long long* lists) {
    unsigned warp = threadIdx.x / 32;
    if (warp >= merge.mergers) return;
    lists += warp * merge.results.chunks * merge.results.width;
#pragma unroll 1
    for (unsigned row = warp; row < merge.rows(); row += merge.mergers) finish_row(merge, children, row, lists);
}

// The draft's ids become tokens; those of the rows from `first` on, `count` of them, are written as candidates. By
// `threads` threads.
__device__ inline void map_tokens(
    const Merge& merge, const Children& children, unsigned first, unsigned count, unsigned thread, unsigned threads) {
    unsigned top_k = merge.top_k, start = level_start(merge.level, top_k);
#pragma unroll 1
    for (unsigned child = thread; child < merge.rows() * top_k; child += threads) {
        unsigned long long key = children.keys[child];
        int token = target_token(merge.draft_to_target, children.tokens[child]);
        unsigned row = child / top_k;
        if (row >= first && row < first + count) {
            merge.candidates.scores[start + child] = key == 0 ? minus_infinity() : key_value(unsigned(key >> 32));
            merge.candidates.parents[start + child] = key == 0 ? -1 : children.parents[row];
            merge.candidates.tokens[start + child] = token;
        }
        children.tokens[child] = token;
    }
}

}  // namespace draft
