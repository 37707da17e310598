#include "cuda/acceptance.cuh"
#include "shared/groups.cuh"
#include "shared/ordered_keys.cuh"
#include "shared/programmatic_launch.cuh"

namespace acceptance {

// value_and_id of the largest value that this thread meets in a row, 0 where nothing is above -inf. Several loads are on
// their way at once.
__device__ inline unsigned long long largest_of_row(const float* row, unsigned vocabulary) {
    constexpr unsigned BATCH = 4;
    bool aligned = aligned_16(row);
    unsigned stride = gridDim.x * blockDim.x, groups = group_count(vocabulary), best_id = 0;
    float best = minus_infinity();
    for (unsigned first = blockIdx.x * blockDim.x + threadIdx.x; first < groups; first += BATCH * stride) {
        Group values[BATCH];
#pragma unroll
        for (unsigned i = 0; i < BATCH; ++i) values[i] = load_group(row, vocabulary, first + i * stride, aligned);
#pragma unroll
        for (unsigned i = 0; i < BATCH; ++i) {
            for (unsigned j = 0; j < 4; ++j) {
                if (values[i].value[j] > best) {  // ids ascend, so the lowest of equals stays; NaN is never larger
                    best = values[i].value[j];
                    best_id = 4 * (first + i * stride) + j;
                }
            }
        }
    }
    return best > minus_infinity() ? value_and_id(best, best_id) : 0;
}

}  // namespace acceptance

// The argmax of every node's row; the last block of a slot then walks its tree. Grid (blocks of a row, nodes, slots). May be
// launched while the kernel before it still runs; the tree is older than that one.
extern "C" __global__ void eagle_accept(
    const float* logits, const int* tree_tokens, const int* tree_parents, const int* tree_depths, const int* active,
    const int* vocab_mapping, int* accepted_indices, int* accepted_ids, int* acceptance_lengths,
    acceptance::Row* workspace, unsigned vocabulary, unsigned most) {
    using namespace acceptance;
    __shared__ unsigned long long partial[MAXIMUM_WARPS];
    __shared__ bool is_last;
    __shared__ int drawn[MAXIMUM_TREE_SIZE];
    launch_next_kernel();
    wait_for_previous_kernel();
    unsigned slot = blockIdx.z, node = blockIdx.y, tree_size = gridDim.y;
    size_t first_row = (size_t)slot * tree_size;
    Accepted accepted = {accepted_indices, accepted_ids, acceptance_lengths, most};
    if (active[slot] != 1) {
        if (node == 0 && blockIdx.x == 0) write_idle(accepted, slot);
        return;
    }
    Row* rows = workspace + first_row;
    unsigned long long candidate = 0;
    Tree tree = {tree_tokens + first_row, tree_parents + first_row, tree_depths + first_row, tree_size};
    touch(tree);
    bool is_padding = node != 0 && tree_tokens[first_row + node] < 0;
    if (!is_padding) candidate = largest_of_row(logits + (first_row + node) * vocabulary, vocabulary);
    candidate = block_maximum(candidate, partial);
    if (threadIdx.x == 0) {
        atomicMax(&rows[node].best, candidate);
        is_last = last_of(&rows[0].arrived, gridDim.x * tree_size);
    }
    __syncthreads();
    if (!is_last) return;
    for (unsigned i = threadIdx.x; i < tree_size; i += blockDim.x) drawn[i] = winning_id(atomicExch(&rows[i].best, 0ull));
    __syncthreads();
    walk(accepted, slot, tree, {drawn, vocab_mapping, vocabulary});
}

// The walk alone. Grid (slots).
extern "C" __global__ void accept_drawn(
    const int* drawn, const int* tree_tokens, const int* tree_parents, const int* tree_depths, const int* active,
    const int* vocab_mapping, int* accepted_indices, int* accepted_ids, int* acceptance_lengths,
    unsigned tree_size, unsigned mapping_size, unsigned most) {
    using namespace acceptance;
    unsigned slot = blockIdx.x;
    size_t first_row = (size_t)slot * tree_size;
    Accepted accepted = {accepted_indices, accepted_ids, acceptance_lengths, most};
    if (active[slot] != 1) {
        write_idle(accepted, slot);
        return;
    }
    Tree tree = {tree_tokens + first_row, tree_parents + first_row, tree_depths + first_row, tree_size};
    walk(accepted, slot, tree, {drawn + first_row, vocab_mapping, mapping_size});
}
