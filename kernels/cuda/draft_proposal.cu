#include "draft_tree.cuh"
#include "programmatic_launch.cuh"

namespace draft {

// The candidate in the frontier slot, chosen by score: each block ranks all of the level for itself.
__device__ inline int choose_candidate(
    const float* scores, unsigned level, unsigned top_k, unsigned slot, unsigned long long* gathered) {
    __shared__ unsigned long long best[MAXIMUM_TOP_K];
    unsigned start = level_start(level, top_k), count = level_start(level + 1, top_k) - start;
    unsigned long long* keys = gathered + gathered_keys(top_k);
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < count; i += THREADS) {
        keys[i] = existing_key(__ldcg(scores + start + i), start + i);
    }
    best_keys(keys, count, top_k, gathered, best);
    return best[slot] == 0 ? -1 : int(key_id(best[slot]));
}

// Makes the slot's mask row and remembers in `parent_slot` where its parent stands in the frontier before.
__device__ inline void write_proposal_mask(
    unsigned char* mask_row, unsigned keys, int committed, const int* earlier, int candidate, unsigned level,
    unsigned top_k, unsigned slot, unsigned* parent_slot) {
    write_mask_row(mask_row, keys, (long long)committed - 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned parent = 0;
        see(mask_row, keys, (long long)committed + (level - 1) * top_k + slot);
        for (unsigned depth = level; depth > 1 && of_level(candidate, depth, top_k); --depth) {
            slot = (unsigned(candidate) - level_start(depth, top_k)) / top_k;
            if (depth == level) parent = slot;
            see(mask_row, keys, (long long)committed + (depth - 2) * top_k + slot);
            candidate = earlier[(depth - 2) * top_k + slot];
        }
        *parent_slot = parent;
    }
    __syncthreads();
}

}  // namespace draft

// Everything that the draft model reads of one frontier slot. Grid (slots, sequences), THREADS threads. Dynamic shared
// memory: gathered_keys(top_k) keys, then top_k^2, then the frontiers of the levels before. `hidden_rows` are those of
// hidden_in of one sequence. May be launched while the kernel before it still runs.
#define DRAFT_PROPOSAL(NAME, COMPUTE)                                                                                 \
    extern "C" __global__ void __launch_bounds__(draft::THREADS) NAME(                                                \
        const int* committed, const int* position_offsets, const float* rotary_table, const char* embedding,          \
        const char* hidden_in, const int* candidate_tokens, const float* candidate_scores, int* frontiers,            \
        char* inputs_embeds, char* hidden_out, int* kvcache_start_index, COMPUTE* rope_rotary_cos_sin,                \
        unsigned char* attention_mask, unsigned select, unsigned level, unsigned levels, unsigned candidates,         \
        unsigned hidden_rows, unsigned positions, unsigned rotary_size, unsigned keys, unsigned vocabulary,           \
        size_t embedding_bytes, size_t hidden_bytes) {                                                                \
        using namespace draft;                                                                                        \
        extern __shared__ unsigned long long gathered[];                                                              \
        __shared__ unsigned parent_slot;                                                                              \
        launch_next_kernel();                                                                                         \
        wait_for_previous_kernel();                                                                                   \
        unsigned top_k = gridDim.x, slot = blockIdx.x;                                                                \
        size_t sequence = blockIdx.y, place = sequence * top_k + slot;                                                \
        int* own_frontiers = frontiers + sequence * levels * top_k;                                                   \
        int* earlier = reinterpret_cast<int*>(gathered + gathered_keys(top_k) + top_k * top_k);                       \
        for (unsigned i = threadIdx.x; i < (level - 1) * top_k; i += THREADS) earlier[i] = __ldcg(own_frontiers + i); \
        int length = __ldcg(committed + sequence);                                                                    \
        int* entry = own_frontiers + (level - 1) * top_k + slot;                                                      \
        const float* scores = candidate_scores + sequence * candidates;                                               \
        int candidate = select ? choose_candidate(scores, level, top_k, slot, gathered) : __ldcg(entry);              \
        bool valid = of_level(candidate, level, top_k);                                                               \
        int token = valid ? __ldcg(candidate_tokens + sequence * candidates + candidate) : -1;                        \
        write_proposal_mask(                                                                                          \
            attention_mask + place * keys, keys, length, earlier, candidate, level, top_k, slot, &parent_slot);       \
        look_up(embedding, token, inputs_embeds + place * embedding_bytes, vocabulary, embedding_bytes);              \
        const char* hidden = hidden_in + (sequence * hidden_rows + parent_slot) * hidden_bytes;                       \
        copy_fresh_row(hidden_out + place * hidden_bytes, hidden, hidden_bytes);                                      \
        long long position = (long long)length + level - 1 + __ldcg(position_offsets + sequence);                     \
        write_rotary_row(rotary_table, position, rope_rotary_cos_sin + place * rotary_size, positions, rotary_size);  \
        if (threadIdx.x == 0) {                                                                                       \
            if (select) *entry = candidate;                                                                           \
            if (slot == 0) kvcache_start_index[sequence] = length + int((level - 1) * top_k);                         \
        }                                                                                                             \
    }

DRAFT_PROPOSAL(draft_proposal_float32, float)
DRAFT_PROPOSAL(draft_proposal_float16, __half)
DRAFT_PROPOSAL(draft_proposal_bfloat16, __nv_bfloat16)
