#include "cuda/accept_distribution.cuh"

namespace acceptance {

constexpr float FARTHEST = 23.0f;  // from the maximum; weights beyond are 0
constexpr float DISTANCE_SCALE = 65536.0f;
constexpr unsigned DROPPED_BITS = 12;

// Whether a row belongs to a node of an active slot.
__device__ inline bool row_is_used(const int* active, const int* tree_tokens, size_t row) {
    return active[blockIdx.z] == 1 && (blockIdx.y == 0 || tree_tokens[row] >= 0);
}

}  // namespace acceptance

// First of two launches: the largest value of each used row. Grid of both: (blocks of a row, nodes, slots).
extern "C" __global__ void accept_row_best(
    const float* processed, const int* active, const int* tree_tokens, acceptance::Row* workspace,
    unsigned vocabulary) {
    using namespace acceptance;
    __shared__ unsigned long long partial[MAXIMUM_WARPS];
    size_t row = (size_t)blockIdx.z * gridDim.y + blockIdx.y;
    if (!row_is_used(active, tree_tokens, row)) return;
    const float* values = processed + row * vocabulary;
    bool aligned = aligned_16(values);
    unsigned long long best = 0;
    for (unsigned group = blockIdx.x * blockDim.x + threadIdx.x; group < group_count(vocabulary);
         group += gridDim.x * blockDim.x) {
        Group loaded = load_group(values, vocabulary, group, aligned);
        for (unsigned i = 0; i < 4; ++i) best = max(best, value_and_id(loaded.value[i], 4 * group + i));
    }
    best = block_maximum(best, partial);
    if (threadIdx.x == 0) atomicMax(&workspace[row].best, best);
}

// Second: the sum of weights and, for the entropy, of weights times distances from the maximum.
extern "C" __global__ void accept_row_total(
    const float* processed, const float* thresholds, const int* active, const int* tree_tokens,
    acceptance::Row* workspace, unsigned vocabulary) {
    using namespace acceptance;
    __shared__ unsigned long long partial[MAXIMUM_WARPS];
    size_t row = (size_t)blockIdx.z * gridDim.y + blockIdx.y;
    if (!row_is_used(active, tree_tokens, row)) return;
    Distribution distribution = row_distribution(processed + row * vocabulary, thresholds[row], 1.0f, workspace[row]);
    bool aligned = aligned_16(distribution.values);
    unsigned long long total = 0, distance = 0;
    for (unsigned group = blockIdx.x * blockDim.x + threadIdx.x; group < group_count(vocabulary);
         group += gridDim.x * blockDim.x) {
        Group loaded = load_group(distribution.values, vocabulary, group, aligned);
        for (unsigned i = 0; i < 4; ++i) {
            if (4 * group + i >= vocabulary) continue;
            unsigned long long weight = distribution.weight(loaded.value[i]);
            float value = without_nan(loaded.value[i]);
            float away = value == distribution.maximum ? 0.0f : distribution.maximum - value;
            total += weight;
            if (weight != 0) distance += weight * __float2ull_rz(fminf(away, FARTHEST) * DISTANCE_SCALE) >> DROPPED_BITS;
        }
    }
    total = block_sum(total, partial);
    distance = block_sum(distance, partial);
    if (threadIdx.x == 0) {
        atomicAdd(&workspace[row].total, total);
        atomicAdd(&workspace[row].distance, distance);
    }
}
