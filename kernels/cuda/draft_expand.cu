#include "draft_tree.cuh"
#include "groups.cuh"
#include "log_softmax.cuh"
#include "programmatic_launch.cuh"
#include "reductions.cuh"

namespace draft {

constexpr unsigned GROUPS_A_THREAD = CHUNK / 4 / THREADS;
static_assert(4 * GROUPS_A_THREAD * THREADS == CHUNK && CHUNK <= MAXIMUM_KEYS, "a chunk does not fit best_keys");

// What one block leaves of its chunk for the last block of the row.
struct ChunkResults {
    unsigned long long* sums;  // [rows, chunks]
    unsigned long long* best;  // [rows, chunks, top_k]
    float* maxima;             // [rows, chunks]
};

// Where a row's children go, and their parent.
struct Family {
    int parent;
    float score;
    size_t first;
};

__device__ inline Family family_of_row(
    unsigned row, unsigned rows, unsigned level, unsigned top_k, const int* frontiers, unsigned levels,
    const float* candidate_scores, unsigned candidates) {
    size_t sequence = row / rows, slot = row % rows;
    Family family = {-1, 0.0f, sequence * candidates + level_start(level, top_k) + slot * top_k};
    if (level == 1) return family;
    int parent = __ldcg(frontiers + (sequence * levels + level - 2) * top_k + slot);
    bool valid = of_level(parent, level - 1, top_k);
    family.parent = parent;
    family.score = valid ? __ldcg(candidate_scores + sequence * candidates + parent) : minus_infinity();
    return family;
}

}  // namespace draft

// Children of each frontier node. Grid (chunks of the draft vocabulary, rows of all sequences), THREADS threads; `rows`
// are those of one sequence. Dynamic shared memory: gathered_keys(top_k) keys, then MAXIMUM_KEYS. `finished` is 0 before
// and after. May be launched while the kernel before it still runs.
extern "C" __global__ void __launch_bounds__(draft::THREADS) draft_expand(
    const float* logits, const int* draft_to_target, const int* frontiers, int* candidate_tokens,
    float* candidate_scores, int* candidate_parents, unsigned* finished, unsigned long long* sums,
    unsigned long long* chunk_best, float* maxima, unsigned score_children, unsigned vocabulary, unsigned rows,
    unsigned level, unsigned levels, unsigned top_k, unsigned candidates) {
    using namespace draft;
    extern __shared__ unsigned long long gathered[];
    __shared__ unsigned long long best[MAXIMUM_TOP_K];
    __shared__ unsigned long long partial[MAXIMUM_WARPS];
    __shared__ bool last;
    launch_next_kernel();
    wait_for_previous_kernel();

    const float* row = logits + (size_t)blockIdx.y * vocabulary;
    bool aligned = aligned_16(row);
    unsigned first_group = blockIdx.x * (CHUNK / 4) + threadIdx.x;
    unsigned long long* keys = gathered + gathered_keys(top_k);
#pragma unroll
    for (unsigned i = 0; i < GROUPS_A_THREAD; ++i) {
        Group group = load_group(row, vocabulary, first_group + i * THREADS, aligned);
#pragma unroll
        for (unsigned j = 0; j < 4; ++j) {
            unsigned id = 4 * (first_group + i * THREADS) + j;
            keys[(4 * i + j) * THREADS + threadIdx.x] = existing_key(group.value[j], id);
        }
    }
    // Only the row's last block needs it, but here the way to it takes no time of its own.
    Family family =
        family_of_row(blockIdx.y, rows, level, top_k, frontiers, levels, candidate_scores, candidates);
    best_keys(keys, CHUNK, top_k, gathered, best);

    float maximum = best[0] == 0 ? minus_infinity() : key_value(unsigned(best[0] >> 32));
    unsigned long long sum = 0;
    if (score_children) {
#pragma unroll 2
        for (unsigned i = threadIdx.x; i < CHUNK; i += THREADS) {
            if (keys[i] != 0) sum += softmax_weight(below_maximum(key_value(unsigned(keys[i] >> 32)), maximum));
        }
    }
    sum = block_sum(sum, partial);
    size_t chunk = (size_t)blockIdx.y * gridDim.x + blockIdx.x;
    if (threadIdx.x < top_k) chunk_best[chunk * top_k + threadIdx.x] = best[threadIdx.x];
    if (threadIdx.x == 0) sums[chunk] = sum, maxima[chunk] = maximum;
    __syncthreads();
    if (threadIdx.x == 0) last = last_block_of_row(finished + blockIdx.y);
    __syncthreads();
    if (!last) return;

    // The last block of the row puts the chunks together.
    size_t first_chunk = (size_t)blockIdx.y * gridDim.x;
    unsigned long long chunk_sum = 0;
    float chunk_maximum = minus_infinity();
    if (threadIdx.x < gridDim.x) {
        chunk_sum = __ldcg(sums + first_chunk + threadIdx.x);
        chunk_maximum = __ldcg(maxima + first_chunk + threadIdx.x);
    }
    const unsigned long long* all = chunk_best + first_chunk * top_k;
    unsigned count = gridDim.x * top_k;
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < count; i += THREADS) keys[i] = __ldcg(all + i);
    best_keys(keys, count, top_k, gathered, best);
    maximum = best[0] == 0 ? minus_infinity() : key_value(unsigned(best[0] >> 32));
    unsigned long long total = threadIdx.x < gridDim.x ? scaled_sum(chunk_sum, chunk_maximum, maximum) : 0;
#pragma unroll 1
    for (unsigned i = threadIdx.x + THREADS; i < gridDim.x; i += THREADS) {
        total += scaled_sum(__ldcg(sums + first_chunk + i), __ldcg(maxima + first_chunk + i), maximum);
    }
    float log_sum = log_of_sum(block_sum(total, partial));
    if (threadIdx.x < top_k) {
        unsigned i = threadIdx.x;
        float value = key_value(unsigned(best[i] >> 32));
        float score = family.score + (score_children ? below_maximum(value, maximum) - log_sum : 0.0f);
        bool exists = best[i] != 0 && score > minus_infinity();
        candidate_tokens[family.first + i] = exists ? draft_to_target[key_id(best[i])] : -1;
        candidate_scores[family.first + i] = exists ? score : minus_infinity();
        candidate_parents[family.first + i] = exists ? family.parent : -1;
    }
}
