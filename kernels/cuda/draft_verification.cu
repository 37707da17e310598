#include "cuda/draft_children.cuh"
#include "cuda/draft_tree.cuh"
#include "shared/programmatic_launch.cuh"
#include "shared/reductions.cuh"

namespace draft {

constexpr unsigned TREE_THREADS = 512, TREE_WARPS = TREE_THREADS / 32;
constexpr unsigned MAXIMUM_TREE_TOKENS = 1024;

// The candidates as the selection sees them. Those of the last level may still be in shared memory alone. KEPT: all of them
// are brought there at once; else, where they are too many, they are read at each look.
template <bool KEPT> struct CandidateView {
    Candidates candidates;
    Children children;
    unsigned* kept_keys;  // ordered keys of the scores
    int *kept_tokens, *kept_parents;
    unsigned count, first_child, level, top_k;

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

// Arrays of one sequence that hold the tree.
struct Tree {
    int *tokens, *parents, *depths, *draw_positions;
    unsigned char* ancestors;
};

__device__ inline void write_node(
    const Tree& tree, unsigned tokens, const Node& node, int position, const unsigned char* on_path) {
    unsigned place = blockIdx.x;
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < tokens; i += TREE_THREADS) tree.ancestors[place * tokens + i] = on_path[i];
    if (threadIdx.x != 0) return;
    tree.tokens[place] = node.token;
    tree.parents[place] = node.parent;
    tree.depths[place] = node.depth;
    tree.draw_positions[place] = position + node.depth;
}

}  // namespace draft

// Puts the last level's children together, chooses the tree to verify and writes everything that the base model reads of one
// of its tokens. Grid (tokens, sequences), TREE_THREADS threads: each block selects all of the tree for itself and writes one
// token. Dynamic shared memory: the keys of the level's children, the lists that are merged, the children's tokens and
// parents, then three words a candidate if KEPT. May be launched while the kernel before it still runs.
#define DRAFT_VERIFICATION(NAME, COMPUTE, KEPT)                                                                       \
    extern "C" __global__ void __launch_bounds__(draft::TREE_THREADS) NAME(                                           \
        const int* token_ids, const int* first_positions, const int* committed, const int* position_offsets,          \
        const float* rotary_table, const char* embedding, int* candidate_tokens, float* candidate_scores,             \
        int* candidate_parents, const int* frontiers, int* selected, int* tree_tokens, int* tree_parents,             \
        int* tree_depths, unsigned char* tree_ancestors, int* draw_positions, char* inputs_embeds,                    \
        COMPUTE* rope_rotary_cos_sin, unsigned char* attention_mask, const unsigned long long* best,                  \
        const unsigned long long* sums, const float* maxima, const int* draft_to_target, unsigned chunks,             \
        unsigned score_children, unsigned mergers, unsigned level, unsigned levels, unsigned top_k, unsigned select,  \
        unsigned counted, unsigned candidate_count, unsigned selected_size, unsigned positions, unsigned rotary_size, \
        unsigned keys, unsigned vocabulary, size_t embedding_bytes) {                                                 \
        using namespace draft;                                                                                        \
        extern __shared__ unsigned long long shared_keys[];                                                           \
        __shared__ int chosen[MAXIMUM_TREE_TOKENS];                                                                   \
        __shared__ unsigned short up[MAXIMUM_TREE_TOKENS];                                                            \
        __shared__ unsigned char on_path[MAXIMUM_TREE_TOKENS];                                                        \
        __shared__ Node node;                                                                                         \
        __shared__ int own_token;                                                                                     \
        launch_next_kernel();                                                                                         \
        unsigned tokens = gridDim.x, place = blockIdx.x;                                                              \
        unsigned rows = level == 1 ? 1 : top_k, count = chunks == 0 ? 0 : rows * top_k;                               \
        unsigned first_child = chunks == 0 ? counted : level_start(level, top_k);                                     \
        size_t sequence = blockIdx.y, first = sequence * tokens, at = first + place;                                  \
        Expansion expansion = {best, sums, maxima, draft_to_target, chunks, score_children, mergers};                 \
        size_t own = sequence * candidate_count;                                                                      \
        Candidates candidates = {                                                                                     \
            candidate_tokens + own, candidate_scores + own, candidate_parents + own,                                  \
            frontiers + sequence * levels * top_k};                                                                   \
        unsigned long long* lists = shared_keys + count;                                                              \
        int* integers = reinterpret_cast<int*>(lists + mergers * chunks * top_k);                                     \
        Children children = {shared_keys, integers, integers + count};                                                \
        int* kept = children.parents + (chunks == 0 ? 0 : rows);                                                      \
        CandidateView<KEPT> view = {                                                                                  \
            candidates, children, reinterpret_cast<unsigned*>(kept), kept + counted, kept + 2 * counted, counted,     \
            first_child, level, top_k};                                                                               \
        int* own_selected = selected + sequence * selected_size;                                                      \
        unsigned char* mask_row = attention_mask + at * keys;                                                         \
        unsigned row_thread = TREE_THREADS - 1 - threadIdx.x;                                                         \
        wait_for_previous_kernel();                                                                                   \
                                                                                                                      \
        int length = __ldcg(committed + sequence), root = __ldcg(token_ids + sequence);                               \
        if (row_thread < MASK_THREADS) {                                                                              \
            view.keep(0, min(first_child, counted), row_thread, MASK_THREADS);                                        \
            write_mask_row(mask_row, keys, (long long)length - 1, row_thread, MASK_THREADS);                          \
        }                                                                                                             \
        if (chunks != 0) {                                                                                            \
            finish_children(expansion, candidates, children, sequence, level, top_k, lists);                          \
            __syncthreads();                                                                                          \
            unsigned written = place == 0 ? rows : 0;                                                                 \
            map_tokens(                                                                                               \
                expansion, candidates, children, level, top_k, 0, written, threadIdx.x, TREE_THREADS);                \
        }                                                                                                             \
        __syncthreads();                                                                                              \
        view.keep(min(first_child, counted), counted, threadIdx.x, TREE_THREADS);                                     \
        __syncthreads();                                                                                              \
        unsigned number;                                                                                              \
        if (select) {                                                                                                 \
            number = select_ascending(view, selected_size, chosen);                                                   \
            _Pragma("unroll 1") for (unsigned i = threadIdx.x; place == 0 && i < selected_size; i += TREE_THREADS) {  \
                own_selected[i] = i < number ? chosen[i] : -1;                                                        \
            }                                                                                                         \
        } else {                                                                                                      \
            number = read_ascending(own_selected, selected_size, counted, chosen);                                    \
        }                                                                                                             \
        if (threadIdx.x == 0 && place == 0) own_token = root;                                                         \
        _Pragma("unroll 1") for (unsigned i = threadIdx.x; i < tokens; i += TREE_THREADS) {                           \
            unsigned above = i;                                                                                       \
            if (i > 0 && i <= number) {                                                                               \
                int token = view.token(chosen[i - 1]);                                                                \
                above = place_of_parent(chosen, number, i, token, view.parent(chosen[i - 1]));                        \
                if (i == place) own_token = token;                                                                    \
            }                                                                                                         \
            up[i] = above;                                                                                            \
            on_path[i] = 0;                                                                                           \
        }                                                                                                             \
        __syncthreads();                                                                                              \
        if (threadIdx.x == 0) node = find_node(up, place, own_token, on_path);                                        \
        __syncthreads();                                                                                              \
        _Pragma("unroll 1") for (unsigned i = threadIdx.x; i < tokens; i += TREE_THREADS) {                           \
            if (on_path[i]) see(mask_row, keys, (long long)length + i);                                               \
        }                                                                                                             \
        Tree tree = {tree_tokens + first, tree_parents + first, tree_depths + first, draw_positions + first,          \
                     tree_ancestors + first * tokens};                                                                \
        look_up(embedding, node.token, inputs_embeds + at * embedding_bytes, vocabulary, embedding_bytes);            \
        write_node(tree, tokens, node, __ldcg(first_positions + sequence), on_path);                                  \
        long long position = (long long)length + node.depth + __ldcg(position_offsets + sequence);                    \
        write_rotary_row(rotary_table, position, rope_rotary_cos_sin + at * rotary_size, positions, rotary_size);     \
    }

DRAFT_VERIFICATION(draft_verification_float32, float, true)
DRAFT_VERIFICATION(draft_verification_float16, __half, true)
DRAFT_VERIFICATION(draft_verification_bfloat16, __nv_bfloat16, true)
DRAFT_VERIFICATION(draft_verification_large_float32, float, false)
DRAFT_VERIFICATION(draft_verification_large_float16, __half, false)
DRAFT_VERIFICATION(draft_verification_large_bfloat16, __nv_bfloat16, false)
