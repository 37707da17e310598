// Penalties and temperature at the nodes of trees, whose paths count as generated.
#include "acceptance/arguments.cuh"
#include "sampling/process_row.cuh"

namespace acceptance {

constexpr unsigned MARK_WORDS = 32;  // a filter of 1,024 bits, which few groups without a token of the path pass

// Counts of a slot, raised by the tokens on the path to a node.
struct PathCounts {
    const int* counts;
    const int* path;        // shared
    const unsigned* marks;  // shared
    unsigned path_size;

    __device__ void raise(unsigned group, int (&seen)[4]) const {
        if (!(marks[group / 32 % MARK_WORDS] >> group % 32 & 1)) return;
        for (unsigned i = 0; i < path_size; ++i) {
            if (unsigned(path[i]) / 4 != group) continue;
            unsigned place = unsigned(path[i]) % 4;
            for (unsigned j = 0; j < 4; ++j) seen[j] += place == j;  // an index known at compile time: a register
        }
    }
};

}  // namespace acceptance

// process_logits of every node of the trees. Grid (blocks of a row, nodes, slots).
__global__ void process_tree_logits(ProcessTreeLogitsArguments a) {
    using namespace acceptance;
    __shared__ int path[MAXIMUM_TREE_SIZE];
    __shared__ unsigned marks[MARK_WORDS], path_size;
    unsigned slot = blockIdx.z, tree_size = gridDim.y, vocabulary = a.V;
    size_t row = (size_t)slot * tree_size + blockIdx.y;
    LogitSettings settings = logit_settings(a.rows[slot]);
    if (threadIdx.x < MARK_WORDS) marks[threadIdx.x] = 0;
    if (threadIdx.x == 0) path_size = 0;
    __syncthreads();
    if (settings.penalizes()) {
        for (unsigned node = 1 + threadIdx.x; node < tree_size; node += blockDim.x) {
            unsigned token = a.tree.tokens[(size_t)slot * tree_size + node];
            if (!a.tree.ancestors[row * tree_size + node] || token >= vocabulary) continue;
            path[atomicAdd(&path_size, 1u)] = token;
            unsigned group = token / 4;
            atomicOr(marks + group / 32 % MARK_WORDS, 1u << group % 32);
        }
    }
    __syncthreads();
    PathCounts counts = {a.token_counts + (size_t)slot * vocabulary, path, marks, path_size};
    process_row(a.logits + row * vocabulary, a.processed + row * vocabulary, counts, settings, vocabulary);
}
