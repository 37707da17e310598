// Products of rows with packed matrices of the experts that each of them chose.
#include "decode/packed_rows.cuh"
#include "experts/few_rows.cuh"

namespace decode {
namespace packed {

template <typename T, typename G, int KIND, typename Pairs>
__device__ __forceinline__ void multiply_pairs(const experts::Product& given, const Pairs& pairs, char* shared) {
    using Output = experts::GroupOutput<T, KIND, Pairs>;
    if (experts::is_of_others(given)) {
        experts::wait_for_inputs<KIND>();
        if constexpr (KIND == experts::SUMS) experts::add_finished<T, G::UNIT>(given, pairs);
        return;
    }
    const Linear linear = experts::layer_of<T>(given, pairs.count);
    const Output output{given, pairs};
    Source<G> stream(linear, shared);
    stream.start();
    OwnPair<T, G, Output> pair(linear, output);
    pair.read(0);
    experts::wait_for_inputs<KIND>();
    stage_input<T, G>(static_cast<const T*>(given.input), output, shared + G::BEHIND, linear);
    multiply_staged(linear, stream, pair, shared + G::BEHIND, reinterpret_cast<float*>(shared + G::AREAS_BEGIN));
    if constexpr (KIND == experts::SUMS) experts::add_finished<T, G::UNIT>(given, pairs);
}

// Of geometries for ONE row each pair is by itself.
template <typename T, typename G, int KIND> __device__ __forceinline__ void multiply(const experts::Product& given) {
    extern __shared__ __align__(16) char shared[];
    experts::begin_behind_choice<KIND, G::LATE>(given);
    if constexpr (G::ONE) {
        multiply_pairs<T, G, KIND>(given, experts::OnePair{static_cast<int>(blockIdx.y)}, shared);
    } else {
        __shared__ experts::Group group;
        if (experts::find_group(given, group)) multiply_pairs<T, G, KIND>(given, group, shared);
        else experts::wait_for_inputs<KIND>();
    }
    experts::end_behind_choice<KIND>(given);
}

ROWS_KERNEL(expert_gated, experts::Product) { multiply<T, ROWS_GEOMETRY(true), experts::GATED>(arguments); }
ROWS_KERNEL(expert_alternating, experts::Product) { multiply<T, ROWS_GEOMETRY(false), experts::ALTERNATING>(arguments); }
ROWS_KERNEL(expert_squared, experts::Product) { multiply<T, ROWS_GEOMETRY(false), experts::SQUARED>(arguments); }
ROWS_KERNEL(expert_sums, experts::Product) { multiply<T, ROWS_GEOMETRY(false), experts::SUMS>(arguments); }

}  // namespace packed
}  // namespace decode
