#include "cuda/accept_distribution.cuh"

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
extern "C" __global__ void typical_accept(
    const float* processed, const float* thresholds, const float* temperature, const int* drawn,
    const int* tree_tokens, const int* tree_parents, const int* tree_depths, const int* active, double epsilon,
    double delta, int* accepted_indices, int* accepted_ids, int* acceptance_lengths, acceptance::Row* workspace,
    unsigned tree_size, unsigned vocabulary, unsigned most) {
    using namespace acceptance;
    __shared__ bool typical[MAXIMUM_TREE_SIZE];
    __shared__ unsigned short lengths[MAXIMUM_TREE_SIZE];  // of the accepted path to each node; 0: not accepted
    __shared__ int path[MAXIMUM_ACCEPTED];
    __shared__ unsigned length;
    unsigned slot = blockIdx.x;
    size_t first_row = (size_t)slot * tree_size;
    Accepted accepted = {accepted_indices, accepted_ids, acceptance_lengths, most};
    if (active[slot] != 1) {
        write_idle(accepted, slot);
        return;
    }
    Tree tree = {tree_tokens + first_row, tree_parents + first_row, tree_depths + first_row, tree_size};
    DrawnTokens drawn_tokens = {drawn + first_row, nullptr, 0};
    Row* rows = workspace + first_row;
    bool greedy = temperature[slot] == 0.0f;
    if (!greedy) {
        for (unsigned node = threadIdx.x; node < tree_size; node += blockDim.x) {
            int parent = tree.parents[node], token = tree.tokens[node];
            bool accepts = false;
            if (is_child(tree, node, parent) && unsigned(token) < vocabulary && rows[parent].total != 0) {
                size_t row = first_row + parent;
                const float* values = processed + row * vocabulary;
                Distribution p = row_distribution(values, thresholds[row], 1.0f, rows[parent]);
                double probability = __ull2double_rn(p.weight(values[token])) / __ull2double_rn(rows[parent].total);
                accepts = probability > typical_bound(rows[parent], epsilon, delta);
            }
            typical[node] = accepts;
        }
    }
    __syncthreads();
    for (unsigned node = threadIdx.x; node < tree_size; node += blockDim.x) {
        rows[node].best = 0, rows[node].total = 0, rows[node].distance = 0;
    }
    if (greedy) {
        walk(accepted, slot, tree, drawn_tokens);
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
    write_path(accepted, slot, tree, drawn_tokens, path, length);
}
