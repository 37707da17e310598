// Products of rows with dense matrices of the experts that each of them chose.
#include "decode/linear.cuh"
#include "experts/few_rows.cuh"

namespace experts {

template <typename T, typename G, int KIND, typename Pairs>
__device__ __forceinline__ void multiply_pairs(const Product& given, const Pairs& pairs, char* shared) {
    if (is_of_others(given)) {
        wait_for_inputs<KIND>();
        if constexpr (KIND == SUMS) add_finished<T, G::UNIT>(given, pairs);
        return;
    }
    const Linear linear = layer_of<T>(given, pairs.count);
    const GroupOutput<T, KIND, Pairs> output{given, pairs};
    char* staged = shared + G::SUMS_BEGIN;
    decode::Weights<T, G, false> weights(linear, shared);
    wait_for_inputs<KIND>();
    decode::stage_as_is(static_cast<const T*>(given.input), output, staged, linear.batch, linear.columns, linear.steps);
    decode::multiply_units(weights, decode::staged_for_lane(staged, linear.batch, linear.steps),
                           static_cast<const T*>(linear.bias), output, reinterpret_cast<float*>(shared + G::PARTIAL),
                           linear.batch);
    if constexpr (KIND == SUMS) add_finished<T, G::UNIT>(given, pairs);
}

// G: of linear.cuh, for up to eight rows of activations.
template <typename T, typename G, int KIND, bool GROUPED>
__global__ void __launch_bounds__(decode::THREADS, G::BLOCKS) dense(const __grid_constant__ Product given) {
    extern __shared__ __align__(16) char shared[];
    begin_behind_choice<KIND>(given);
    if constexpr (GROUPED) {
        __shared__ Group group;
        if (find_group(given, group)) multiply_pairs<T, G, KIND>(given, group, shared);
        else wait_for_inputs<KIND>();
    } else {
        multiply_pairs<T, G, KIND>(given, OnePair{static_cast<int>(blockIdx.y)}, shared);
    }
    end_behind_choice<KIND>(given);
}

}  // namespace experts
