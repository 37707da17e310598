#include "draft_children.cuh"
#include "draft_tree.cuh"
#include "programmatic_launch.cuh"

namespace draft {

constexpr unsigned PROPOSAL_THREADS = 512;

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

// Marks what the slot sees of the frontiers, and returns where its parent stands in the one before. By one thread.
__device__ inline unsigned see_ancestors(
    unsigned char* mask_row, unsigned keys, int committed, const int* frontiers, int candidate, unsigned level,
    unsigned top_k, unsigned slot) {
    unsigned parent = 0;
    see(mask_row, keys, (long long)committed + (level - 1) * top_k + slot);
#pragma unroll 1
    for (unsigned depth = level; depth > 1 && of_level(candidate, depth, top_k); --depth) {
        slot = (unsigned(candidate) - level_start(depth, top_k)) / top_k;
        if (depth == level) parent = slot;
        see(mask_row, keys, (long long)committed + (depth - 2) * top_k + slot);
        candidate = frontiers[(depth - 2) * top_k + slot];
    }
    return parent;
}

}  // namespace draft

// Puts the level's children together and writes everything that the draft model reads of one frontier slot. Grid (slots,
// sequences), PROPOSAL_THREADS threads. Dynamic shared memory: the keys of the level's children, the lists that are merged,
// the children's tokens, the frontiers of the levels before. `hidden_rows` are those of hidden_in of one sequence. May be
// launched while the kernel before it still runs.
#define DRAFT_PROPOSAL(NAME, COMPUTE)                                                                                 \
    extern "C" __global__ void __launch_bounds__(draft::PROPOSAL_THREADS) NAME(                                       \
        const int* committed, const int* position_offsets, const float* rotary_table, const char* embedding,          \
        const char* hidden_in, int* candidate_tokens, float* candidate_scores, int* candidate_parents,                \
        int* frontiers, char* inputs_embeds, char* hidden_out, int* kvcache_start_index,                              \
        COMPUTE* rope_rotary_cos_sin, unsigned char* attention_mask, const unsigned long long* best,                  \
        const unsigned long long* sums, const float* maxima, const int* draft_to_target, unsigned chunks,             \
        unsigned score_children, unsigned draft_vocabulary, unsigned mergers, unsigned select, unsigned level,        \
        unsigned levels, unsigned candidate_count, unsigned hidden_rows, unsigned positions, unsigned rotary_size,    \
        unsigned keys, unsigned vocabulary, size_t embedding_bytes, size_t hidden_bytes) {                            \
        using namespace draft;                                                                                        \
        extern __shared__ unsigned long long shared_keys[];                                                           \
        __shared__ unsigned parent_slot;                                                                              \
        __shared__ int chosen;                                                                                        \
        launch_next_kernel();                                                                                         \
        unsigned top_k = gridDim.x, slot = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;              \
        unsigned rows = level == 1 ? 1 : top_k, count = rows * top_k;                                                 \
        size_t sequence = blockIdx.y, place = sequence * top_k + slot;                                                \
        Expansion expansion = {                                                                                       \
            best, sums, maxima, draft_to_target, chunks, score_children, draft_vocabulary, mergers};                  \
        size_t own = sequence * candidate_count;                                                                      \
        int* own_frontiers = frontiers + sequence * levels * top_k;                                                   \
        Candidates candidates = {                                                                                     \
            candidate_tokens + own, candidate_scores + own, candidate_parents + own, own_frontiers};                  \
        unsigned long long* lists = shared_keys + count;                                                              \
        Children children = {shared_keys, reinterpret_cast<int*>(lists + mergers * chunks * top_k)};                  \
        int* earlier = children.tokens + count;                                                                       \
        unsigned char* mask_row = attention_mask + place * keys;                                                      \
        prefetch_mapping(expansion, slot, top_k);                                                                     \
        wait_for_previous_kernel();                                                                                   \
                                                                                                                      \
        _Pragma("unroll 1") for (unsigned i = threadIdx.x; i < (level - 1) * top_k; i += PROPOSAL_THREADS) {                              \
            earlier[i] = __ldcg(own_frontiers + i);                                                                   \
        }                                                                                                             \
        int length = __ldcg(committed + sequence);                                                                    \
        int* entry = own_frontiers + (level - 1) * top_k + slot;                                                      \
        int candidate = select ? -1 : __ldcg(entry);                                                                  \
        unsigned row_thread = PROPOSAL_THREADS - 1 - threadIdx.x;                                                     \
        if (row_thread < MASK_THREADS) {                                                                              \
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
        if (warp == 0) {                                                                                              \
            if (select) {                                                                                             \
                Ranked ranked = merge_lists(children.keys, rows, top_k);                                              \
                unsigned long long key = __shfl_sync(ALL_LANES, slot < 32 ? ranked.key[0] : ranked.key[1], slot % 32); \
                candidate = key == 0 ? -1 : int(key_id(key));                                                         \
            }                                                                                                         \
            if (lane == 0) {                                                                                          \
                parent_slot = see_ancestors(                                                                          \
                    mask_row, keys, length, earlier, candidate, level, top_k, slot);                                  \
                chosen = candidate;                                                                                   \
                if (select) *entry = candidate;                                                                       \
                if (slot == 0) kvcache_start_index[sequence] = length + int((level - 1) * top_k);                     \
            }                                                                                                         \
        } else if (chunks != 0 && warp == 1 && slot < rows) {                                                         \
            write_children(candidates, children, level, top_k, slot * top_k, top_k, lane, 32);                        \
        }                                                                                                             \
        __syncthreads();                                                                                              \
        candidate = chosen;                                                                                           \
        bool valid = of_level(candidate, level, top_k);                                                               \
        int token = valid ? children.tokens[candidate - level_start(level, top_k)] : -1;                              \
        look_up(embedding, token, inputs_embeds + place * embedding_bytes, vocabulary, embedding_bytes);              \
        const char* hidden = hidden_in + (sequence * hidden_rows + parent_slot) * hidden_bytes;                       \
        copy_fresh_row(hidden_out + place * hidden_bytes, hidden, hidden_bytes);                                      \
    }

DRAFT_PROPOSAL(draft_proposal_float32, float)
DRAFT_PROPOSAL(draft_proposal_float16, __half)
DRAFT_PROPOSAL(draft_proposal_bfloat16, __nv_bfloat16)
