// Products of rows with dense matrices of the experts that each of them chose.
#include "decode/linear.cuh"
#include "experts/few_rows.cuh"

namespace experts {

// G: of linear.cuh, for one row of activations.
template <typename T, typename G, int KIND>
__global__ void __launch_bounds__(decode::THREADS, G::BLOCKS) dense(const __grid_constant__ Product given) {
    extern __shared__ __align__(16) char shared[];
    launch_next_kernel();
    wait_for_previous_kernel();
    const Linear linear = layer_of<T>(given, blockIdx.y);
    char* staged = shared + G::SUMS_BEGIN;
    decode::Weights<T, G, false> weights(linear, shared);
    const decode::SelectedRows as_they_are{nullptr, 1};
    decode::stage_as_is(input_of<T>(given, blockIdx.y), as_they_are, staged, 1, linear.columns, linear.steps);
    decode::multiply_units(weights, decode::staged_for_lane(staged, 1, linear.steps), static_cast<const T*>(linear.bias),
                           output_of<T, KIND>(given, blockIdx.y), reinterpret_cast<float*>(shared + G::PARTIAL), 1);
}

}  // namespace experts
