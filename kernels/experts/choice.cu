// What stands around the products of a mixture of experts: which experts a row goes through and its shares of them, and the sum of
// what they give.
#include "experts/choice.cuh"

namespace experts {

// A block of a warp for each row; ids and weights [rows, chosen], shared [rows].
template <typename T, int EACH>
__global__ void __launch_bounds__(32)
    choose(const __grid_constant__ Choice given, int* ids, float* weights, float* shared) {
    const int row = blockIdx.x;
    __shared__ int own_ids[32];
    __shared__ float own_scores[32];
    if (given.next_early) launch_next_kernel();
    wait_for_previous_kernel();
    if (!given.next_early) launch_next_kernel();
    const float* scores = given.scores + static_cast<size_t>(row) * given.experts;
    const auto score_of = [&](int expert) { return __ldcg(scores + expert); };
    choose_row<T, EACH>(given, score_of, own_ids, own_scores, row, ids + row * given.chosen, weights + row * given.chosen, shared + row);
}

static_assert(sizeof(Addition) == HOST_ADDITION_BYTES, "as the host's structure");

// Of row blockIdx.y: a thread has four columns.
template <typename T> __global__ void __launch_bounds__(HOST_ADDING_THREADS) add(const __grid_constant__ Addition given) {
    const int column = (blockIdx.x * HOST_ADDING_THREADS + threadIdx.x) * 4;
    launch_next_kernel();
    wait_for_previous_kernel();
    if (column < given.width) add_four<T>(given, blockIdx.y, column);
}

}  // namespace experts
