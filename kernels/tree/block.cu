// A block that the draft model fills in one pass: what the model reads of it, and how what it says of each place becomes
// the candidates of a tree.
#include "shared/programmatic_launch.cuh"
#include "tree/children.cuh"

// Writes everything that the draft model reads of one token of a block. Grid (tokens, sequences), TREE_THREADS threads. May be
// launched while the kernel before it still runs.
template <class Compute>
__global__ void __launch_bounds__(TREE_THREADS) draft_block(PrepareBlockArguments a) {
    using namespace draft;
    launch_next_kernel();
    unsigned tokens = gridDim.x, token = blockIdx.x, keys = a.L;
    size_t sequence = blockIdx.y, place = sequence * tokens + token;
    wait_for_previous_kernel();

    int length = __ldcg(a.inputs.kvcache_start_index + sequence);
    int id = token == 0 ? __ldcg(a.token_ids + sequence) : int(a.block.mask_token);
    unsigned row_thread = TREE_THREADS - 1 - threadIdx.x;
    if (row_thread < MASK_THREADS) {
        long long last = (long long)length + (a.block.sees_all ? tokens - 1 : token);
        write_mask_row(a.inputs.attention_mask + place * keys, keys, last, row_thread, MASK_THREADS);
        long long position = (long long)length + token + __ldcg(a.tables.position_offsets + sequence);
        Compute* rotary_row = reinterpret_cast<Compute*>(a.inputs.rope_rotary_cos_sin) + place * a.R;
        write_rotary_row(a.tables.rotary, position, rotary_row, a.P, a.R, row_thread, MASK_THREADS);
    }
    look_up<Compute>(a.tables.embedding, id, a.inputs.inputs_embeds + place * a.H * sizeof(Compute), a.V, a.H);
}

// Puts together what draft_expand left of each place of a block and writes the candidates of all levels, one after the other,
// as each level's frontier follows from the one before. Grid (1, sequences), TREE_THREADS threads. Dynamic shared memory: the
// keys of the best of each place; the lists that are merged, then the keys of a level's children; the tokens of the best of
// each place. May be launched while the kernel before it still runs.
__global__ void __launch_bounds__(TREE_THREADS) draft_block_tree(ExpandBlockArguments a, unsigned mergers) {
    using namespace draft;
    extern __shared__ unsigned long long best[];
    __shared__ unsigned long long ranked[MAXIMUM_TOP_K];
    __shared__ int frontier[MAXIMUM_TOP_K], no_parents[TREE_THREADS / 32];
    __shared__ float frontier_scores[MAXIMUM_TOP_K];
    launch_next_kernel();
    unsigned top_k = a.K, width = a.level.width, levels = a.level.number, rows = a.n, warp = threadIdx.x / 32;
    unsigned chunks = chunk_count(a.U), lists_size = max(mergers * chunks * width, top_k * top_k);
    size_t sequence = blockIdx.y;
    SequenceCandidates candidates = of_sequence(a.candidates, sequence, a.C, a.F, top_k);
    ChunkResults results = chunk_results(a.expansion.workspace, size_t(gridDim.y) * rows, chunks, width);
    unsigned long long* children = best + levels * top_k;
    int* tokens = reinterpret_cast<int*>(children + lists_size);
    wait_for_previous_kernel();

    if (warp < mergers) {
#pragma unroll 1
        for (unsigned place = warp; place < levels; place += mergers) {  // each as if it followed the root
            Merge merge = {results, a.expansion.draft_to_target, sequence * rows + place + 1, 1, top_k, mergers,
                           a.level.dynamic != 0, candidates};
            Children own = {best + place * top_k, tokens + place * top_k, no_parents + warp};
            finish_row(merge, own, 0, children + warp * chunks * width);
        }
    }
    __syncthreads();
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < levels * top_k; i += TREE_THREADS) {
        tokens[i] = target_token(a.expansion.draft_to_target, tokens[i]);
    }
    __syncthreads();
#pragma unroll 1
    for (unsigned level = 1; level <= levels; ++level) {
        unsigned start = level_start(level, top_k), count = level == 1 ? top_k : top_k * top_k;
#pragma unroll 1
        for (unsigned child = threadIdx.x; child < count; child += TREE_THREADS) {
            unsigned slot = child / top_k, of_place = (level - 1) * top_k + child % top_k;
            float score = level == 1 ? 0.0f : frontier_scores[slot];
            score += best[of_place] == 0 ? minus_infinity() : key_value(unsigned(best[of_place] >> 32));
            bool exists = score > minus_infinity();
            children[child] = exists ? value_and_id(score, start + child) : 0;
            candidates.scores[start + child] = exists ? score : minus_infinity();
            candidates.tokens[start + child] = exists ? tokens[of_place] : -1;
            candidates.parents[start + child] = exists && level > 1 ? frontier[slot] : -1;
        }
        __syncthreads();
        if (level == levels) break;
        if (warp == 0) {
            int* entries = candidates.frontiers + (level - 1) * top_k;
            if (a.level.dynamic) merge_lists(children, count / top_k, top_k, ranked);
            __syncwarp();
#pragma unroll 1
            for (unsigned slot = threadIdx.x; slot < top_k; slot += 32) {
                int candidate = a.level.dynamic ? -1 : __ldcg(entries + slot);
                if (a.level.dynamic) {
                    if (slot < width && ranked[slot] != 0) candidate = int(key_id(ranked[slot]));
                    entries[slot] = candidate;
                }
                unsigned long long key = of_level(candidate, level, top_k) ? children[candidate - start] : 0;
                frontier[slot] = candidate;
                frontier_scores[slot] = key == 0 ? minus_infinity() : key_value(unsigned(key >> 32));
            }
        }
        __syncthreads();
    }
}
