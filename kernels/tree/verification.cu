// The tree that the base model verifies: it is chosen among the candidates, laid out, and what the model reads is written.
#include "shared/programmatic_launch.cuh"
#include "shared/reductions.cuh"
#include "tree/children.cuh"

namespace draft {

constexpr unsigned TREE_WARPS = TREE_THREADS / 32;

// The candidates as the selection sees them. Those of the last level may still be in shared memory alone. KEPT: all of them
// are brought there at once; else, where they are too many, they are read at each look.
template <bool KEPT> struct CandidateView {
    SequenceCandidates candidates;
    Children children;
    unsigned* kept_keys;  // ordered keys of the scores
    int *kept_tokens, *kept_parents;
    unsigned count, first_child, top_k;

    // The children are there only after a barrier; what comes before them is read meanwhile.
    __device__ void keep(unsigned first, unsigned end, unsigned thread, unsigned threads) const {
        if (!KEPT) return;
#pragma unroll 2
        for (unsigned i = first + thread; i < end; i += threads) {
            unsigned key = key_at(i);
            int token = token_at(i), parent = parent_at(i);
            kept_keys[i] = key, kept_tokens[i] = token, kept_parents[i] = parent;
        }
    }
    __device__ unsigned key_at(unsigned i) const {
        return i < first_child ? ordered_key(__ldcg(candidates.scores + i)) : unsigned(children.keys[i - first_child] >> 32);
    }
    __device__ int token_at(unsigned i) const {
        return i < first_child ? __ldcg(candidates.tokens + i) : children.tokens[i - first_child];
    }
    __device__ int parent_at(unsigned i) const {
        return i < first_child ? __ldcg(candidates.parents + i) : children.parents[(i - first_child) / top_k];
    }
    __device__ unsigned key(unsigned i) const { return KEPT ? kept_keys[i] : key_at(i); }
    __device__ int token(unsigned i) const { return KEPT ? kept_tokens[i] : token_at(i); }
    __device__ int parent(unsigned i) const { return KEPT ? kept_parents[i] : parent_at(i); }
    // How many are at least `least`; the same in all threads of the block.
    __device__ unsigned number_of(unsigned least) const {
        unsigned number = 0;
#pragma unroll 1
        for (unsigned start = 0; start < count; start += TREE_THREADS) {
            unsigned i = start + threadIdx.x;
            number += __syncthreads_count(i < count && key(i) >= least);
        }
        return number;
    }
};

// The `wanted` largest keys above that of -inf, equal ones by index, as ascending indices to `selected`; returns how many.
template <bool KEPT>
__device__ inline unsigned select_ascending(const CandidateView<KEPT>& view, unsigned wanted, int* selected) {
    __shared__ unsigned counts[2][TREE_WARPS];  // of each warp: keys above the threshold and, in the upper half, equal ones
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The largest threshold that enough keys reach, bit by bit; as many as the last one that was too high lie above it.
    unsigned lowest = ordered_key(minus_infinity()), limit = lowest, ties = 0, number = 0;
    unsigned threshold = 0, above = 0;
#pragma unroll 1
    for (unsigned bit = 0;; bit = bit == 0 ? 1u << 31 : bit >> 1) {
        unsigned at_least = view.number_of(bit == 0 ? lowest + 1 : threshold | bit);
        if (bit == 0) {
            number = min(wanted, at_least);
            if (at_least <= wanted) break;
            continue;
        }
        if (at_least >= wanted) threshold |= bit; else above = at_least;
        limit = at_least == wanted ? threshold - 1 : threshold;
        ties = at_least == wanted ? 0 : wanted - above;  // so many of the keys that equal the limit are selected, too
        if (at_least == wanted || bit == 1) break;
    }
    unsigned above_before = 0, equal_before = 0;
#pragma unroll 1
    for (unsigned start = 0, buffer = 0; start < view.count; start += TREE_THREADS, buffer ^= 1) {
        unsigned i = start + threadIdx.x;
        unsigned key = i < view.count ? view.key(i) : 0;
        bool is_above = key > limit, is_equal = ties != 0 && i < view.count && key == limit;
        unsigned above = __ballot_sync(ALL_LANES, is_above), equal = __ballot_sync(ALL_LANES, is_equal);
        if (lane == 0) counts[buffer][warp] = __popc(above) | __popc(equal) << 16;
        __syncthreads();
        unsigned of_warp = lane < TREE_WARPS ? counts[buffer][lane] : 0;
        unsigned before = __reduce_add_sync(ALL_LANES, lane < warp ? of_warp : 0);
        unsigned all = __reduce_add_sync(ALL_LANES, of_warp), lower = (1u << lane) - 1;
        unsigned place_above = above_before + (before & 0xffff) + __popc(above & lower);
        unsigned place_equal = equal_before + (before >> 16) + __popc(equal & lower);
        if (is_above || (is_equal && place_equal < ties)) selected[place_above + min(place_equal, ties)] = int(i);
        above_before += all & 0xffff;
        equal_before += all >> 16;
    }
    __syncthreads();
    return number;
}

// The caller's choice, up to its first entry that is no candidate; returns how many.
__device__ inline unsigned read_ascending(const int* source, unsigned size, unsigned candidates, int* selected) {
    __shared__ unsigned number;
    if (threadIdx.x == 0) number = size;
    __syncthreads();
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < size; i += TREE_THREADS) {
        selected[i] = __ldcg(source + i);
        if (unsigned(selected[i]) >= candidates) atomicMin(&number, i);
    }
    __syncthreads();
    return number;
}

// Place in the tree of the parent of the candidate at `place`; the place itself where the parent is not in the tree.
__device__ inline unsigned place_of_parent(
    const int* selected, unsigned number, unsigned place, int token, int parent) {
    if (token < 0 || parent >= selected[place - 1]) return place;
    if (parent == -1) return 0;
    unsigned first = 0, last = number;  // the first entry that is not below the parent lies in this range
#pragma unroll 1
    while (first < last) {
        unsigned middle = (first + last) / 2;
        if (selected[middle] < parent) first = middle + 1; else last = middle;
    }
    return first < number && selected[first] == parent ? first + 1 : place;
}

struct Node {
    int token, parent, depth;
};

// The token at `place` and, in `on_path`, the places on its way from the root; padding where the way does not end there.
__device__ inline Node find_node(
    const unsigned short* up, unsigned place, int token, unsigned char* on_path) {
    unsigned node = place;
    int depth = 0;
    on_path[node] = 1;
#pragma unroll 1
    while (up[node] != node) {
        node = up[node];
        on_path[node] = 1;
        ++depth;
    }
    if (place == 0) return {token, -1, 0};
    if (node == 0) return {token, int(up[place]), depth};
    for (node = place; up[node] != node;) {  // only the token itself stays
        node = up[node];
        on_path[node] = 0;
    }
    on_path[place] = 1;
    return {-1, -1, 0};
}

__device__ inline void write_node(
    const TreeNodes& tree, unsigned tokens, const Node& node, int position, const unsigned char* on_path) {
    size_t at = (size_t)blockIdx.y * tokens + blockIdx.x;
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < tokens; i += TREE_THREADS) tree.ancestors[at * tokens + i] = on_path[i];
    if (threadIdx.x != 0) return;
    tree.tokens[at] = node.token;
    tree.parents[at] = node.parent;
    tree.depths[at] = node.depth;
    tree.draw_positions[at] = position + node.depth;
}

}  // namespace draft

// Puts the last level's children together, chooses the tree to verify and writes everything that the base model reads of one
// of its tokens. Grid (tokens, sequences), TREE_THREADS threads: each block selects all of the tree for itself and writes one
// token. Dynamic shared memory: the keys of the level's children, the lists that are merged, the children's tokens and
// parents, then three words a candidate if KEPT. May be launched while the kernel before it still runs.
template <class Compute, bool KEPT>
__global__ void __launch_bounds__(TREE_THREADS) draft_verification(PrepareVerificationArguments a, unsigned mergers) {
    using namespace draft;
    extern __shared__ unsigned long long shared_keys[];
    __shared__ int chosen[MAXIMUM_TREE_TOKENS];
    __shared__ unsigned short up[MAXIMUM_TREE_TOKENS];
    __shared__ unsigned char on_path[MAXIMUM_TREE_TOKENS];
    __shared__ Node node;
    __shared__ int own_token;
    launch_next_kernel();
    unsigned tokens = gridDim.x, place = blockIdx.x, level = a.level.number, top_k = a.K, keys = a.L;
    unsigned counted = level_start(level + 1, top_k), selected_size = a.S;
    size_t sequence = blockIdx.y, at = sequence * tokens + place;
    SequenceCandidates candidates = of_sequence(a.candidates, sequence, a.C, a.F, top_k);
    Merge merge = merge_of(a.expansion, a.level, candidates, a.U, top_k, mergers);
    unsigned chunks = merge.results.chunks, rows = merge.rows(), count = chunks == 0 ? 0 : rows * top_k;
    unsigned first_child = chunks == 0 ? counted : level_start(level, top_k);
    unsigned long long* lists = shared_keys + count;
    int* integers = reinterpret_cast<int*>(lists + mergers * chunks * merge.results.width);
    Children children = {shared_keys, integers, integers + count};
    int* kept = children.parents + (chunks == 0 ? 0 : rows);
    CandidateView<KEPT> view = {
        candidates, children, reinterpret_cast<unsigned*>(kept), kept + counted, kept + 2 * counted, counted,
        first_child, top_k};
    int* own_selected = a.candidates.selected + sequence * selected_size;
    unsigned char* mask_row = a.inputs.attention_mask + at * keys;
    unsigned row_thread = TREE_THREADS - 1 - threadIdx.x;
    wait_for_previous_kernel();

    int length = __ldcg(a.state.kvcache_start_index + sequence), root = __ldcg(a.state.token_ids + sequence);
    if (row_thread < MASK_THREADS) {
        view.keep(0, min(first_child, counted), row_thread, MASK_THREADS);
        write_mask_row(mask_row, keys, (long long)length - 1, row_thread, MASK_THREADS);
    }
    if (chunks != 0) {
        finish_children(merge, children, lists);
        __syncthreads();
        map_tokens(merge, children, 0, place == 0 ? rows : 0, threadIdx.x, TREE_THREADS);
    }
    __syncthreads();
    view.keep(min(first_child, counted), counted, threadIdx.x, TREE_THREADS);
    __syncthreads();
    unsigned number;
    if (a.level.dynamic) {
        number = select_ascending(view, selected_size, chosen);
#pragma unroll 1
        for (unsigned i = threadIdx.x; place == 0 && i < selected_size; i += TREE_THREADS) {
            own_selected[i] = i < number ? chosen[i] : -1;
        }
    } else {
        number = read_ascending(own_selected, selected_size, counted, chosen);
    }
    if (threadIdx.x == 0 && place == 0) own_token = root;
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < tokens; i += TREE_THREADS) {
        unsigned above = i;
        if (i > 0 && i <= number) {
            int token = view.token(chosen[i - 1]);
            above = place_of_parent(chosen, number, i, token, view.parent(chosen[i - 1]));
            if (i == place) own_token = token;
        }
        up[i] = above;
        on_path[i] = 0;
    }
    __syncthreads();
    if (threadIdx.x == 0) node = find_node(up, place, own_token, on_path);
    __syncthreads();
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < tokens; i += TREE_THREADS) {
        if (on_path[i]) see(mask_row, keys, (long long)length + i);
    }
    look_up<Compute>(a.tables.embedding, node.token, a.inputs.inputs_embeds + at * a.H * sizeof(Compute), a.V, a.H);
    write_node(a.tree, tokens, node, __ldcg(a.state.positions + sequence), on_path);
    long long position = (long long)length + node.depth + __ldcg(a.tables.position_offsets + sequence);
    Compute* rotary_row = reinterpret_cast<Compute*>(a.inputs.rope_rotary_cos_sin) + at * a.R;
    write_rotary_row(a.tables.rotary, position, rotary_row, a.P, a.R);
}
