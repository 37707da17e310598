// The order in which a walk visits the nodes of a tree, so that few matrices are kept for nodes whose turn comes later.
//
// Depth first, of a node's children the one with the fewest nodes below it first, the largest last. The matrix behind a node
// of several children is saved; the first child goes on with what registers hold, the others restore it. With the last
// one it is no longer needed, so that its place is free for those below: a place is taken for as long as a child of
// at most half of the nodes below is visited, and of 64 nodes that can be so five times.
#pragma once
#include "recurrent/values.cuh"

namespace recurrent {

constexpr unsigned MOST_NODES = HOST_MOST_NODES, MOST_SAVED = 5;
static_assert(MOST_NODES <= 64, "nodes are bits of a word, and need no more saved matrices");

// Of a step of a plan: its node, the place + 1 that is restored before (0: none), that which is saved behind it.
__device__ __forceinline__ unsigned node_of(unsigned entry) { return entry & 0xffu; }
__device__ __forceinline__ unsigned restored(unsigned entry) { return entry >> 8 & 0xffu; }
__device__ __forceinline__ unsigned saves(unsigned entry) { return entry >> 16; }

struct TreePlan {
    unsigned steps[MOST_NODES];
    unsigned long long above[MOST_NODES];  // a node and its ancestors, as bits
    int parents[MOST_NODES], further[MOST_NODES];
    unsigned below[MOST_NODES], before[MOST_NODES], places[MOST_NODES];  // nodes below and itself; see `make`

    __device__ bool is_below_root(unsigned node) const { return above[node] & 1; }

    // Plans a tree of `count` nodes, by all threads of a block, at least MOST_NODES. How many steps it has.
    __device__ unsigned make(const int* given, unsigned count) {
        const unsigned node = threadIdx.x;
        const bool exists = node < count;
        int parent = -1;
        if (exists) {
            parent = earlier(__ldcg(given + node), node);
            parents[node] = further[node] = parent;
            above[node] = 1ull << node | (parent < 0 ? 0 : 1ull << parent);
        }
        if (__syncthreads_and(!exists || parent == int(node) - 1)) {  // a chain
            if (exists) steps[node] = node, above[node] |= 1;
            __syncthreads();
            return count;
        }
        // The ancestors up to twice as many as before, until all are known.
        while (__syncthreads_or(exists && parent >= 0)) {
            unsigned long long more = 0;
            if (exists && parent >= 0) more = above[parent], parent = further[parent];
            __syncthreads();
            if (exists) above[node] |= more, further[node] = parent;
        }
        const bool is_used = exists && is_below_root(node);
        const unsigned steps_of_all = __syncthreads_count(is_used);
        parent = exists ? parents[node] : -1;
        if (exists) {
            unsigned size = 0;
            for (unsigned other = node; other < count; ++other) size += above[other] >> node & 1;
            below[node] = size;
        }
        __syncthreads();
        // Nodes between the parent and this one, and whether a sibling comes later.
        unsigned own_before = 1, children = 0, siblings_before = 0;
        bool is_last = true;
        if (is_used) {
            for (unsigned other = 0; other < count; ++other) {
                children += parents[other] == int(node);
                if (node == 0 || other == node || parents[other] != parent) continue;  // padding has none, as the root
                const bool comes_first = below[other] < below[node] || (below[other] == below[node] && other < node);
                if (comes_first) own_before += below[other], ++siblings_before;
                else is_last = false;
            }
            before[node] = node == 0 ? 0 : own_before;
            places[node] = node != 0 && !is_last;
        }
        __syncthreads();
        if (is_used) {
            unsigned place = 0, saved = 0, parent_saved = 0;
            for (unsigned long long left = above[node]; left != 0; left &= left - 1) {
                const unsigned ancestor = __ffsll(left) - 1;
                place += before[ancestor];
                if (ancestor == node) parent_saved = saved;
                saved += places[ancestor];
            }
            const unsigned restores = siblings_before > 0 ? parent_saved + 1 : 0;
            steps[place] = node | restores << 8 | (children > 1 ? saved + 1 : 0) << 16;
        }
        __syncthreads();
        return steps_of_all;
    }
};

}  // namespace recurrent
