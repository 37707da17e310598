// Products of rows with packed matrices of the experts that each of them chose.
#include "decode/packed_rows.cuh"
#include "experts/few_rows.cuh"

namespace decode {
namespace packed {

template <typename T, typename G, int KIND> __device__ __forceinline__ void multiply_pair(const experts::Product& given) {
    wait_for_previous_kernel();
    NormLinear own = {};
    own.linear = experts::layer_of<T>(given, blockIdx.y);
    own.inputs[0].values = experts::input_of<T>(given, blockIdx.y);
    own.next_early = 1;
    multiply_input<T, G, false, false>(own, experts::output_of<T, KIND>(given, blockIdx.y));
}

ROWS_KERNEL(expert_gated, experts::Product) { multiply_pair<T, ROWS_GEOMETRY(true), experts::GATED>(arguments); }
ROWS_KERNEL(expert_alternating, experts::Product) {
    multiply_pair<T, ROWS_GEOMETRY(false), experts::ALTERNATING>(arguments);
}
ROWS_KERNEL(expert_sums, experts::Product) { multiply_pair<T, ROWS_GEOMETRY(false), experts::SUMS>(arguments); }

}  // namespace packed
}  // namespace decode
