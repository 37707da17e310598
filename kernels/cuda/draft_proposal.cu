#include "cuda/draft_children.cuh"
#include "cuda/draft_tree.cuh"
#include "shared/programmatic_launch.cuh"

namespace draft {

constexpr unsigned PROPOSAL_THREADS = 512, SELECT_THREADS = 256;
constexpr unsigned MOST_COMPARED = 512;  // keys, each with each

// The keys of scores that are already there, where the block need not put children together.
__device__ inline void read_children(
    const Candidates& candidates, const Children& children, unsigned level, unsigned top_k) {
    unsigned start = level_start(level, top_k), count = level_start(level + 1, top_k) - start;
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < count; i += PROPOSAL_THREADS) {
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
// sequences), PROPOSAL_THREADS threads. Dynamic shared memory: the keys of the level's children, the lists that are merged,
// the children's tokens and their parents, the frontiers of the levels before. `hidden_rows` are those of hidden_in of one sequence. May be
// launched while the kernel before it still runs.
#define DRAFT_PROPOSAL(NAME, COMPUTE)                                                                                 \
    extern "C" __global__ void __launch_bounds__(draft::PROPOSAL_THREADS) NAME(                                       \
        const int* committed, const int* position_offsets, const float* rotary_table, const char* embedding,          \
        const char* hidden_in, int* candidate_tokens, float* candidate_scores, int* candidate_parents,                \
        int* frontiers, char* inputs_embeds, char* hidden_out, int* kvcache_start_index,                              \
        COMPUTE* rope_rotary_cos_sin, unsigned char* attention_mask, const unsigned long long* best,                  \
        const unsigned long long* sums, const float* maxima, const int* draft_to_target, unsigned chunks,             \
        unsigned score_children, unsigned mergers, unsigned select, unsigned level, unsigned levels,                  \
        unsigned candidate_count, unsigned hidden_rows, unsigned positions, unsigned rotary_size, unsigned keys,      \
        unsigned vocabulary, size_t embedding_bytes, size_t hidden_bytes) {                                           \
        using namespace draft;                                                                                        \
        extern __shared__ unsigned long long shared_keys[];                                                           \
        __shared__ unsigned long long ranked[MAXIMUM_TOP_K];                                                          \
        __shared__ int chosen;                                                                                        \
        launch_next_kernel();                                                                                         \
        unsigned top_k = gridDim.x, slot = blockIdx.x;                                                                \
        unsigned rows = level == 1 ? 1 : top_k, count = rows * top_k;                                                 \
        size_t sequence = blockIdx.y, place = sequence * top_k + slot;                                                \
        Expansion expansion = {                                                                                       \
            best, sums, maxima, draft_to_target, chunks, score_children, mergers};                                    \
        size_t own = sequence * candidate_count;                                                                      \
        int* own_frontiers = frontiers + sequence * levels * top_k;                                                   \
        Candidates candidates = {                                                                                     \
            candidate_tokens + own, candidate_scores + own, candidate_parents + own, own_frontiers};                  \
        unsigned long long* lists = shared_keys + count;                                                              \
        int* integers = reinterpret_cast<int*>(lists + mergers * chunks * top_k);                                     \
        Children children = {shared_keys, integers, integers + count};                                                \
        int* earlier = children.parents + rows;                                                                       \
        unsigned char* mask_row = attention_mask + place * keys;                                                      \
        wait_for_previous_kernel();                                                                                   \
                                                                                                                      \
        int length = __ldcg(committed + sequence);                                                                    \
        int* entry = own_frontiers + (level - 1) * top_k + slot;                                                      \
        if (threadIdx.x == 0) chosen = select ? -1 : __ldcg(entry);                                                   \
        unsigned row_thread = PROPOSAL_THREADS - 1 - threadIdx.x;                                                     \
        if (row_thread < MASK_THREADS) {                                                                              \
            _Pragma("unroll 1") for (unsigned i = row_thread; i < (level - 1) * top_k; i += MASK_THREADS) {           \
                earlier[i] = __ldcg(own_frontiers + i);                                                               \
            }                                                                                                         \
            write_mask_row(mask_row, keys, (long long)length - 1, row_thread, MASK_THREADS);                          \
            long long position = (long long)length + level - 1 + __ldcg(position_offsets + sequence);                 \
            COMPUTE* rotary_row = rope_rotary_cos_sin + place * rotary_size;                                          \
            write_rotary_row(                                                                                         \
                rotary_table, position, rotary_row, positions, rotary_size, row_thread, MASK_THREADS);                \
        }                                                                                                             \
        if (chunks == 0) {                                                                                            \
            read_children(candidates, children, level, top_k);                                                        \
        } else {                                                                                                      \
            finish_children(expansion, candidates, children, sequence, level, top_k, lists);                          \
        }                                                                                                             \
        __syncthreads();                                                                                              \
        if (threadIdx.x < SELECT_THREADS) {                                                                           \
            if (select) choose_candidate(children.keys, rows, top_k, slot, ranked, &chosen);                          \
        } else if (chunks != 0) {                                                                                     \
            map_tokens(                                                                                               \
                expansion, candidates, children, level, top_k, slot, 1, threadIdx.x - SELECT_THREADS,                 \
                PROPOSAL_THREADS - SELECT_THREADS);                                                                   \
        }                                                                                                             \
        __syncthreads();                                                                                              \
        int candidate = chosen;                                                                                       \
        bool valid = of_level(candidate, level, top_k);                                                               \
        unsigned child = valid ? candidate - level_start(level, top_k) : 0;                                           \
        unsigned parent_slot = level == 1 ? 0 : child / top_k;                                                        \
        int token = valid ? children.tokens[child] : -1;                                                              \
        if (threadIdx.x == PROPOSAL_THREADS - 1) {                                                                    \
            see_ancestors(mask_row, keys, length, earlier, candidate, level, top_k, slot);                            \
            if (select) *entry = candidate;                                                                           \
            if (slot == 0) kvcache_start_index[sequence] = length + int((level - 1) * top_k);                         \
        }                                                                                                             \
        constexpr unsigned HALF = PROPOSAL_THREADS / 2;                                                               \
        if (threadIdx.x < HALF) {                                                                                     \
            char* target = inputs_embeds + place * embedding_bytes;                                                   \
            look_up(embedding, token, target, vocabulary, embedding_bytes, threadIdx.x, HALF);                        \
        } else {                                                                                                      \
            const char* hidden = hidden_in + (sequence * hidden_rows + parent_slot) * hidden_bytes;                   \
            copy_fresh_row(hidden_out + place * hidden_bytes, hidden, hidden_bytes, threadIdx.x - HALF, HALF);        \
        }                                                                                                             \
    }

DRAFT_PROPOSAL(draft_proposal_float32, float)
DRAFT_PROPOSAL(draft_proposal_float16, __half)
DRAFT_PROPOSAL(draft_proposal_bfloat16, __nv_bfloat16)
