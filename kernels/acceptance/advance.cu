// After acceptance: caches, features and counters. What a kernel of compaction, gathering or advance reads comes from the
// second-level cache, as it may start while the kernel before it still runs.
#include "acceptance/arguments.cuh"
#include "shared/programmatic_launch.cuh"

namespace acceptance {

struct CachePointers {
    void* cache[CACHES_PER_LAUNCH];
};

// One element (of the widest type that fits) of one row of one head, over all accepted rows in ascending order. Sources
// lie behind their targets and ascend, so that a batch may be read before it is written.
template <class Element>
__device__ inline void compact_rows(
    const MoveAcceptedArguments& a, const CachePointers& caches, unsigned item, unsigned cache_count,
    unsigned elements) {
    constexpr unsigned BATCH = 8;
    unsigned slot = blockIdx.y, heads = a.H, rows = a.R;
    if (item >= cache_count * heads * elements) return;
    unsigned head = item / elements % heads, cache = item / elements / heads;
    Element* column = static_cast<Element*>(caches.cache[cache]) +
                      ((size_t)slot * heads + head) * rows * elements + item % elements;
    unsigned length = min(max(__ldcg(a.accepted.lengths + slot), 0), int(a.W));
    long long start = __ldcg(a.kvcache_start_index + slot);
    const int* indices = a.accepted.indices + (size_t)slot * a.W;
    // Where a ring has the row of an index.
    auto row_of = [&](long long index) {
        return a.wraps && index >= 0 ? (long long)((unsigned)(start + index) % rows) : start + index;
    };
    for (unsigned first = 0; first < length; first += BATCH) {
        Element values[BATCH];
        bool moves[BATCH];
#pragma unroll
        for (unsigned i = 0; i < BATCH; ++i) {
            int index = first + i < length ? __ldcg(indices + first + i) : int(first + i);
            long long source = row_of(index), target = row_of(first + i);
            moves[i] = source != target && min(source, target) >= 0 && max(source, target) < rows;
            if (moves[i]) values[i] = __ldcg(column + source * elements);
        }
#pragma unroll
        for (unsigned i = 0; i < BATCH; ++i) {
            if (moves[i]) column[row_of(first + i) * elements] = values[i];
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
__device__ inline void gather_row(const MoveAcceptedArguments& a, unsigned place, unsigned elements) {
    unsigned slot = blockIdx.y;
    if (int(place) >= __ldcg(a.accepted.lengths + slot)) return;
    unsigned node = __ldcg(a.accepted.indices + (size_t)slot * a.W + place);
    if (node >= a.T) return;
    copy_row<Element>(
        reinterpret_cast<const Element*>(a.hidden_states) + ((size_t)slot * a.T + node) * elements,
        reinterpret_cast<Element*>(a.pending.features) + ((size_t)slot * a.Q + place) * elements, elements);
}

}  // namespace acceptance

// Accepted rows of the caches and, in the first `gathers` blocks, features; rows of a head and features have so many
// elements. Grid (W or 0, then elements of all caches; slots).
template <class Element>
__global__ void move_accepted(
    MoveAcceptedArguments a, const __grid_constant__ acceptance::CachePointers caches, unsigned gathers,
    unsigned cache_count, unsigned elements, unsigned feature_elements) {
    launch_next_kernel();
    wait_for_previous_kernel();
    if (blockIdx.x < gathers) {
        acceptance::gather_row<Element>(a, blockIdx.x, feature_elements);
    } else {
        unsigned item = (blockIdx.x - gathers) * blockDim.x + threadIdx.x;
        acceptance::compact_rows<Element>(a, caches, item, cache_count, elements);
    }
}

// The first `used` elements of each of `groups` groups of a slot, `pitch` elements apart, go to another slot, or two slots
// change places there. Grid (blocks of an array, arrays).
template <class Element>
__global__ void move_slots(
    const __grid_constant__ acceptance::CachePointers arrays, unsigned source, unsigned target, unsigned groups,
    unsigned pitch, unsigned used, unsigned swaps) {
    Element* array = static_cast<Element*>(arrays.cache[blockIdx.y]);
    size_t slot = (size_t)groups * pitch;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < (size_t)groups * used;
         i += (size_t)gridDim.x * blockDim.x) {
        size_t place = i / used * pitch + i % used;
        Element *one = array + source * slot + place, *other = array + target * slot + place;
        Element moved = *one;
        if (swaps) *one = *other;
        *other = moved;
    }
}

// A plain step's feature and token join the pending ones. Grid (slots).
template <class Element>
__global__ void append_pending(AppendPendingArguments a, unsigned elements) {
    unsigned slot = blockIdx.x;
    unsigned count = a.pending.counts[slot];
    if (a.state.active[slot] != 1 || count >= a.Q) return;
    size_t place = (size_t)slot * a.Q + count;
    acceptance::copy_row<Element>(
        reinterpret_cast<const Element*>(a.hidden_states) + (size_t)slot * elements,
        reinterpret_cast<Element*>(a.pending.features) + place * elements, elements);
    __syncthreads();  // every thread has read the count
    if (threadIdx.x != 0) return;
    a.pending.token_ids[place] = a.tokens[slot];
    a.pending.counts[slot] = count + 1;
    a.pending.start[slot] = a.state.kvcache_start_index[slot] - int(count + 1);
    a.pending.last[slot] = count;
}

// Each active slot takes its accepted tokens. Grid (slots).
__global__ void advance_accepted(AdvanceAcceptedArguments a) {
    launch_next_kernel();
    wait_for_previous_kernel();
    unsigned slot = blockIdx.x, most = a.W, vocabulary = a.V, pending_rows = a.Q;
    const int* ids = a.accepted.ids + (size_t)slot * most;
    int* emitted_row = a.emitted + (size_t)slot * (most + 1);
    int length = __ldcg(a.state.active + slot) == 1 ? min(max(__ldcg(a.accepted.lengths + slot), 0), int(most)) : 0;
    for (int i = threadIdx.x; i < int(most); i += blockDim.x) {
        int token = i < length ? __ldcg(ids + i) : -1;
        emitted_row[i + 1] = token;
        if (i < length && unsigned(token) < vocabulary) {
            atomicAdd(a.state.token_counts + (size_t)slot * vocabulary + token, 1);
        }
    }
    if (threadIdx.x == 0) emitted_row[0] = length;
    if (length == 0) return;
    for (int i = threadIdx.x; i < int(pending_rows); i += blockDim.x) {
        a.pending.token_ids[(size_t)slot * pending_rows + i] = i < length ? __ldcg(ids + i) : -1;
    }
    if (threadIdx.x != 0) return;
    int start = __ldcg(a.state.kvcache_start_index + slot);
    a.state.token_ids[slot] = __ldcg(ids + length - 1);
    a.state.kvcache_start_index[slot] = start + length;
    a.state.positions[slot] = __ldcg(a.state.positions + slot) + length;
    a.pending.counts[slot] = length;
    a.pending.start[slot] = start;
    a.pending.last[slot] = length - 1;
}
