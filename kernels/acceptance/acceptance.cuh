// What the acceptance kernels share: limits, workspace, and the walk along drawn tokens.
#pragma once

#include "acceptance/arguments.cuh"
#include "shared/last_of.cuh"
#include "shared/reductions.cuh"

namespace acceptance {

// Workspace of one row of logits. Everything but `stop` is 0 before a kernel's first launch and after its
// last, whatever the batch and the tree size; so all may share it. The first row of a slot serves the slot too.
struct Row {
    unsigned long long best;      // value_and_id of the largest value
    unsigned long long total;     // sum of fixed-point weights
    unsigned long long distance;  // sum of weights times distances from the maximum
    unsigned long long drawn_best, drawn_fallback;
    unsigned finished;  // blocks of the slot's draw
    unsigned arrived;   // blocks of the slot
    int stop;  // node at which a chain ends; STOP_REJECTED is added where its draft was refused
};
static_assert(sizeof(Row) == ROW_BYTES, "the host allocates rows of another size");

struct Tree {
    const int *tokens, *parents, *depths;  // of one slot
    unsigned size;
};

__device__ inline Tree tree_of(const TreeNodes& all, unsigned slot, unsigned size) {
    size_t first = (size_t)slot * size;
    return {all.tokens + first, all.parents + first, all.depths + first, size};
}

__device__ inline Row* rows_of(unsigned char* workspace, unsigned slot, unsigned size) {
    return reinterpret_cast<Row*>(workspace) + (size_t)slot * size;
}

// Id of a winning value_and_id; 0 where there is none.
__device__ inline int winning_id(unsigned long long winner) {
    return winner == 0 ? 0 : int(0xffffffffu - unsigned(winner));
}

// An idle slot accepts nothing. By a whole block.
__device__ inline void write_idle(const Accepted& accepted, unsigned most, unsigned slot) {
    for (unsigned i = threadIdx.x; i < most; i += blockDim.x) {
        accepted.indices[(size_t)slot * most + i] = -1;
        accepted.ids[(size_t)slot * most + i] = -1;
    }
    if (threadIdx.x == 0) accepted.lengths[slot] = 0;
}

// Writes the path of `length` nodes in `path` (shared), the bonus drawn at its end. By a whole block, synchronized before.
__device__ inline void write_path(
    const Accepted& accepted, unsigned most, unsigned slot, const Tree& tree, const int* drawn, const int* path,
    unsigned length) {
    for (unsigned i = threadIdx.x; i < most; i += blockDim.x) {
        int token = i + 1 < length ? tree.tokens[path[i + 1]] : i + 1 == length ? drawn[path[i]] : -1;
        accepted.indices[(size_t)slot * most + i] = i < length ? path[i] : -1;
        accepted.ids[(size_t)slot * most + i] = token;
    }
    if (threadIdx.x == 0) accepted.lengths[slot] = length;
}

// Starts to load what lies at an address, and waits for nothing: the next load finds it near.
__device__ inline void touch(const int* address) {
    int ignored;
    asm volatile("ld.global.ca.s32 %0, [%1];" : "=r"(ignored) : "l"(address));
}

// All of a tree. By a whole block.
__device__ inline void touch(const Tree& tree) {
    unsigned node = 32 * threadIdx.x;
    if (node < tree.size) touch(tree.tokens + node), touch(tree.parents + node), touch(tree.depths + node);
}

// Whether a node is a child of the one that its parent index names.
__device__ inline bool is_child(const Tree& tree, unsigned node, int parent) {
    return parent >= 0 && unsigned(parent) < node && tree.depths[node] == tree.depths[parent] + 1;
}

// Follow the drawn tokens from the root. By a whole block.
__device__ inline void walk(
    const Accepted& accepted, unsigned most, unsigned slot, const Tree& tree, const int* drawn) {
    __shared__ unsigned next[MAXIMUM_TREE_SIZE];  // the child that each node's drawn token leads to
    __shared__ int path[MAXIMUM_ACCEPTED];
    __shared__ unsigned length;
    for (unsigned node = threadIdx.x; node < tree.size; node += blockDim.x) next[node] = MAXIMUM_TREE_SIZE;
    __syncthreads();
    for (unsigned node = 1 + threadIdx.x; node < tree.size; node += blockDim.x) {
        int parent = tree.parents[node];
        if (is_child(tree, node, parent) && tree.tokens[node] == drawn[parent]) atomicMin(next + parent, node);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned node = 0, count = 0;
        do {
            path[count++] = node;
            node = next[node];
        } while (node < MAXIMUM_TREE_SIZE && count < most);
        length = count;
    }
    __syncthreads();
    write_path(accepted, most, slot, tree, drawn, path, length);
}

}  // namespace acceptance
