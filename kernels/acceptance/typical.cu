// Typical acceptance: the path of tokens that the base finds likely enough.
#include "acceptance/rows.cuh"

namespace acceptance {

constexpr double FIXED_POINT_UNIT = 0x1p-32, DISTANCE_UNIT = 0x1p-36;

// min(epsilon, delta * exp(-entropy)) of a row with a total.
__device__ inline double typical_bound(const Row& row, double epsilon, double delta) {
    double normalizer = __ull2double_rn(row.total) * FIXED_POINT_UNIT;
    double entropy = double(portable_log(__double2float_rn(normalizer))) +
                     __ull2double_rn(row.distance) * DISTANCE_UNIT / normalizer;
    float exponent = __double2float_rn(-fmax(entropy, 0.0));
    return fmin(epsilon, delta * (__ull2double_rn(fixed_point_exp(exponent)) * FIXED_POINT_UNIT));
}

}  // namespace acceptance

// Third launch of typical acceptance: the deepest path of typical tokens. Grid (slots).
__global__ void typical_accept(TypicalAcceptArguments a) {
    using namespace acceptance;
    __shared__ bool typical[MAXIMUM_TREE_SIZE];
    __shared__ unsigned short lengths[MAXIMUM_TREE_SIZE];  // of the accepted path to each node; 0: not accepted
    __shared__ int path[MAXIMUM_ACCEPTED];
    __shared__ unsigned length;
    unsigned slot = blockIdx.x, tree_size = a.T, vocabulary = a.V, most = a.W;
    size_t first_row = (size_t)slot * tree_size;
    if (a.active[slot] != 1) {
        write_idle(a.accepted, most, slot);
        return;
    }
    Tree tree = tree_of(a.tree, slot, tree_size);
    const int* drawn = a.nodes.drawn + first_row;
    Row* rows = rows_of(a.workspace, slot, tree_size);
    bool greedy = a.rows[slot].temperature == 0.0f;
    if (!greedy) {
        for (unsigned node = threadIdx.x; node < tree_size; node += blockDim.x) {
            int parent = tree.parents[node], token = tree.tokens[node];
            bool accepts = false;
            if (is_child(tree, node, parent) && unsigned(token) < vocabulary && rows[parent].total != 0) {
                size_t row = first_row + parent;
                const float* values = a.nodes.logits + row * vocabulary;
                Distribution p = row_distribution(values, a.nodes.thresholds[row], 1.0f, rows[parent]);
                double probability = __ull2double_rn(p.weight(values[token])) / __ull2double_rn(rows[parent].total);
                accepts = probability > typical_bound(rows[parent], a.bounds.epsilon, a.bounds.delta);
            }
            typical[node] = accepts;
        }
    }
    __syncthreads();
    for (unsigned node = threadIdx.x; node < tree_size; node += blockDim.x) {
        rows[node].best = 0, rows[node].total = 0, rows[node].distance = 0;
    }
    if (greedy) {
        walk(a.accepted, most, slot, tree, drawn);
        return;
    }
    if (threadIdx.x == 0) {
        unsigned end = 0;
        lengths[0] = 1;
        for (unsigned node = 1; node < tree_size; ++node) {
            unsigned before = typical[node] ? lengths[tree.parents[node]] : 0;
            lengths[node] = before != 0 && before < most ? before + 1 : 0;
            if (lengths[node] > lengths[end]) end = node;
        }
        length = lengths[end];
        for (unsigned i = length; i-- > 0;) {
            path[i] = end;
            end = i > 0 ? tree.parents[end] : 0;
        }
    }
    __syncthreads();
    write_path(a.accepted, most, slot, tree, drawn, path, length);
}
