// After acceptance: caches, features and counters. What a kernel of compaction, gathering or advance reads comes from the
// second-level cache, as it may start while the kernel before it still runs.
#include "shared/programmatic_launch.cuh"

namespace acceptance {

constexpr unsigned CACHES_PER_LAUNCH = 256;  // as of cuda_accepted_state.py

struct CachePointers {
    void* cache[CACHES_PER_LAUNCH];
};

// One element (of the widest type that fits) of one row of one head, over all accepted rows in ascending order. Sources
// lie behind their targets and ascend, so that a batch may be read before it is written.
template <class Element>
__device__ inline void compact_rows(
    const CachePointers& caches, const int* kvcache_start_index, const int* accepted_indices,
    const int* acceptance_lengths, unsigned item, unsigned cache_count, unsigned heads, unsigned rows, unsigned elements,
    unsigned most) {
    constexpr unsigned BATCH = 8;
    unsigned slot = blockIdx.y;
    if (item >= cache_count * heads * elements) return;
    unsigned head = item / elements % heads, cache = item / elements / heads;
    Element* column = static_cast<Element*>(caches.cache[cache]) +
                      ((size_t)slot * heads + head) * rows * elements + item % elements;
    unsigned length = min(max(__ldcg(acceptance_lengths + slot), 0), int(most));
    long long start = __ldcg(kvcache_start_index + slot);
    const int* indices = accepted_indices + (size_t)slot * most;
    for (unsigned first = 0; first < length; first += BATCH) {
        Element values[BATCH];
        bool moves[BATCH];
#pragma unroll
        for (unsigned i = 0; i < BATCH; ++i) {
            int index = first + i < length ? __ldcg(indices + first + i) : int(first + i);
            long long source = start + index, target = start + first + i;
            moves[i] = source != target && min(source, target) >= 0 && max(source, target) < rows;
            if (moves[i]) values[i] = __ldcg(column + source * elements);
        }
#pragma unroll
        for (unsigned i = 0; i < BATCH; ++i) {
            if (moves[i]) column[(start + first + i) * elements] = values[i];
        }
    }
}

// Copies `elements` by a whole block.
template <class Element>
__device__ inline void copy_row(const void* source, void* target, unsigned elements) {
    for (unsigned i = threadIdx.x; i < elements; i += blockDim.x) {
        static_cast<Element*>(target)[i] = __ldcg(static_cast<const Element*>(source) + i);
    }
}

// Feature of an accepted node to its `place` among the pending ones.
template <class Element>
__device__ inline void gather_row(
    const Element* hidden_states, const int* accepted_indices, const int* acceptance_lengths,
    Element* pending_features, unsigned place, unsigned tree_size, unsigned pending_rows, unsigned elements,
    unsigned most) {
    unsigned slot = blockIdx.y;
    if (int(place) >= __ldcg(acceptance_lengths + slot)) return;
    unsigned node = __ldcg(accepted_indices + (size_t)slot * most + place);
    if (node >= tree_size) return;
    copy_row<Element>(
        hidden_states + ((size_t)slot * tree_size + node) * elements,
        pending_features + ((size_t)slot * pending_rows + place) * elements, elements);
}

// A plain step's feature and token join the pending ones. Grid (slots).
template <class Element>
__device__ inline void append_row(
    const Element* hidden_states, const int* tokens, const int* active, Element* pending_features, int* pending_ids,
    int* pending_counts, const int* kvcache_start_index, int* draft_start, int* draft_last, unsigned pending_rows,
    unsigned elements) {
    unsigned slot = blockIdx.x;
    unsigned count = pending_counts[slot];
    if (active[slot] != 1 || count >= pending_rows) return;
    size_t place = (size_t)slot * pending_rows + count;
    copy_row<Element>(hidden_states + (size_t)slot * elements, pending_features + place * elements, elements);
    __syncthreads();  // every thread has read the count
    if (threadIdx.x != 0) return;
    pending_ids[place] = tokens[slot];
    pending_counts[slot] = count + 1;
    draft_start[slot] = kvcache_start_index[slot] - int(count + 1);
    draft_last[slot] = count;
}

}  // namespace acceptance

// Accepted rows of the caches and, in the first `features` blocks, features. Grid (W or 0, then elements of all caches; slots).
#define ACCEPTANCE_COPIES(SUFFIX, ELEMENT)                                                                            \
    extern "C" __global__ void move_accepted_##SUFFIX(                                                                \
        const __grid_constant__ acceptance::CachePointers caches, const int* kvcache_start_index,                     \
        const int* accepted_indices, const int* acceptance_lengths, const ELEMENT* hidden_states,                     \
        ELEMENT* pending_features, unsigned features, unsigned cache_count, unsigned heads, unsigned rows,            \
        unsigned elements, unsigned tree_size, unsigned pending_rows, unsigned feature_elements, unsigned most) {     \
        launch_next_kernel();                                                                                         \
        wait_for_previous_kernel();                                                                                   \
        if (blockIdx.x < features) {                                                                                  \
            acceptance::gather_row(                                                                                   \
                hidden_states, accepted_indices, acceptance_lengths, pending_features, blockIdx.x, tree_size,         \
                pending_rows, feature_elements, most);                                                                \
        } else {                                                                                                      \
            acceptance::compact_rows<ELEMENT>(                                                                        \
                caches, kvcache_start_index, accepted_indices, acceptance_lengths,                                    \
                (blockIdx.x - features) * blockDim.x + threadIdx.x, cache_count, heads, rows, elements, most);        \
        }                                                                                                             \
    }                                                                                                                 \
    extern "C" __global__ void append_pending_##SUFFIX(                                                               \
        const ELEMENT* hidden_states, const int* tokens, const int* active, ELEMENT* pending_features,                \
        int* pending_ids, int* pending_counts, const int* kvcache_start_index, int* draft_start, int* draft_last,     \
        unsigned pending_rows, unsigned elements) {                                                                   \
        acceptance::append_row(                                                                                       \
            hidden_states, tokens, active, pending_features, pending_ids, pending_counts, kvcache_start_index,        \
            draft_start, draft_last, pending_rows, elements);                                                         \
    }

ACCEPTANCE_COPIES(16, uint4)
ACCEPTANCE_COPIES(4, unsigned)
ACCEPTANCE_COPIES(2, unsigned short)
#undef ACCEPTANCE_COPIES

// Each active slot takes its accepted tokens. Grid (slots).
extern "C" __global__ void advance_accepted(
    const int* accepted_ids, const int* acceptance_lengths, const int* active, int* token_ids,
    int* kvcache_start_index, int* positions, int* token_counts, int* pending_ids, int* pending_counts,
    int* draft_start, int* draft_last, int* emitted, unsigned vocabulary, unsigned pending_rows, unsigned most) {
    launch_next_kernel();
    wait_for_previous_kernel();
    unsigned slot = blockIdx.x;
    const int* ids = accepted_ids + (size_t)slot * most;
    int* emitted_row = emitted + (size_t)slot * (most + 1);
    int length = __ldcg(active + slot) == 1 ? min(max(__ldcg(acceptance_lengths + slot), 0), int(most)) : 0;
    for (int i = threadIdx.x; i < int(most); i += blockDim.x) {
        int token = i < length ? __ldcg(ids + i) : -1;
        emitted_row[i + 1] = token;
        if (i < length && unsigned(token) < vocabulary) {
            atomicAdd(token_counts + (size_t)slot * vocabulary + token, 1);
        }
    }
    if (threadIdx.x == 0) emitted_row[0] = length;
    if (length == 0) return;
    for (int i = threadIdx.x; i < int(pending_rows); i += blockDim.x) {
        pending_ids[(size_t)slot * pending_rows + i] = i < length ? __ldcg(ids + i) : -1;
    }
    if (threadIdx.x != 0) return;
    int start = __ldcg(kvcache_start_index + slot);
    token_ids[slot] = __ldcg(ids + length - 1);
    kvcache_start_index[slot] = start + length;
    positions[slot] = __ldcg(positions + slot) + length;
    pending_counts[slot] = length;
    draft_start[slot] = start;
    draft_last[slot] = length - 1;
}
