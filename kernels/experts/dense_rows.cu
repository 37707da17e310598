// Products of rows with dense matrices of the experts that each of them chose.
#include "decode/linear.cuh"
#include "experts/few_rows.cuh"

namespace experts {

template <typename T, typename G, int KIND, typename Pairs>
__device__ __forceinline__ void multiply_pairs(const Product& given, const Choices& chosen, const Pairs& pairs, char* shared) {
    if (is_of_others(chosen)) {
        wait_for_inputs<T, KIND>(chosen);
        if constexpr (KIND == SUMS) add_finished<T, G::UNIT>(given, chosen, pairs);
        return;
    }
    const Linear linear = layer_of<T>(given, chosen, pairs.count);
    const GroupOutput<T, KIND, Pairs> output{given, pairs};
    char* staged = shared + G::SUMS_BEGIN;
    decode::Weights<T, G, false> weights(linear, shared);
    wait_for_inputs<T, KIND>(chosen);
    decode::stage_as_is(static_cast<const T*>(given.input), output, staged, linear.batch, linear.columns, linear.steps);
    decode::multiply_units(weights, decode::staged_for_lane(staged, linear.batch, linear.steps),
                           static_cast<const T*>(linear.bias), output, reinterpret_cast<float*>(shared + G::PARTIAL),
                           linear.batch);
    if constexpr (KIND == SUMS) add_finished<T, G::UNIT>(given, chosen, pairs);
}

// G: of linear.cuh, for up to eight rows of activations.
template <typename T, typename G, int KIND, bool GROUPED>
__global__ void __launch_bounds__(decode::THREADS, G::BLOCKS) dense(const __grid_constant__ Product given) {
    extern __shared__ __align__(16) char shared[];
    begin_behind_choice<KIND>();
    const Choices chosen(given, shared);
    if constexpr (GROUPED) {
        __shared__ Group group;
        if (find_group(given, chosen, group)) multiply_pairs<T, G, KIND>(given, chosen, group, shared);
        else wait_for_inputs<T, KIND>(chosen);
    } else {
        multiply_pairs<T, G, KIND>(given, chosen, OnePair{static_cast<int>(blockIdx.y)}, shared);
    }
}

}  // namespace experts
