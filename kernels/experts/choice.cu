// What stands around the products of a mixture of experts where many rows chose: the choice, and the sum of what they give.
#include "experts/addition.cuh"

namespace experts {

// A warp for each row; shared [rows] gets its share of the expert that every row goes through, if there is one.
template <typename T, int EACH>
__global__ void __launch_bounds__(32)
    choose(const __grid_constant__ Choice given, int* ids, float* weights, float* shared) {
    const int row = blockIdx.x;
    __shared__ int own_ids[32];
    __shared__ float own_weights[32];
    launch_next_kernel();
    wait_for_previous_kernel();
    RowChoice<EACH> own;
    own.choose(given, row, own_ids, own_weights);
    own.leave_weights(given, own_ids, own_weights);
    if (threadIdx.x < given.chosen) {
        ids[row * given.chosen + threadIdx.x] = own_ids[threadIdx.x];
        weights[row * given.chosen + threadIdx.x] = own_weights[threadIdx.x];
    }
    if (given.gate == nullptr) return;
    const float share = share_of_all<T>(given, row);
    if (threadIdx.x == 0) shared[row] = share;
}

static_assert(sizeof(Addition) == HOST_ADDITION_BYTES, "as the host's structure");

// Of row blockIdx.y: a thread has four columns.
template <typename T>
__global__ void __launch_bounds__(HOST_ADDING_THREADS)
    add(const __grid_constant__ Addition given, const __grid_constant__ Written chosen) {
    const int column = (blockIdx.x * HOST_ADDING_THREADS + threadIdx.x) * 4;
    launch_next_kernel();
    wait_for_previous_kernel();
    if (column < given.width) add_four<T>(given, chosen, blockIdx.y, column);
}

}  // namespace experts
