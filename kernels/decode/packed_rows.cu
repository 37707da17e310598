// The kernels of linear layers over packed weights of up to eight rows of activations, by packed_rows.cuh.
#include "decode/packed_rows.cuh"

namespace decode {
namespace packed {

// Kernels by what their inputs are: normed inside, rounded, or as they are, where added_ first added to a residual; and by what
// becomes of sums: scale (sums + bias), activation(gate) up, or activation(sums + bias) times other rows.
#define ROWS_OF_INPUT(NAME, ARGUMENTS, PAIRED, NORMED, ROUNDED, OUTPUT)                     \
    ROWS_KERNEL(NAME, ARGUMENTS) {                                                          \
        using G = ROWS_GEOMETRY(PAIRED);                                                    \
        multiply_input<T, G, NORMED, ROUNDED>(arguments, OUTPUT<T>(arguments));             \
    }
ROWS_OF_INPUT(norm_linear, NormLinear, false, true, false, float_output)
ROWS_OF_INPUT(rounded_linear, NormLinear, false, false, true, float_output)
ROWS_OF_INPUT(norm_gate_up, NormLinear, true, true, false, gated_output)
ROWS_OF_INPUT(rounded_gate_up, NormLinear, true, false, true, gated_output)
ROWS_OF_INPUT(gate_up, NormLinear, true, false, false, gated_output)
ROWS_OF_INPUT(token_gate, NormLinear, false, false, true, through_output)
ROWS_OF_INPUT(added_norm_linear, AddedNormLinear, false, true, false, float_output)
ROWS_OF_INPUT(added_rounded_linear, AddedNormLinear, false, false, true, float_output)
ROWS_OF_INPUT(added_norm_gate_up, AddedNormLinear, true, true, false, gated_output)
ROWS_OF_INPUT(added_rounded_gate_up, AddedNormLinear, true, false, true, gated_output)
ROWS_OF_INPUT(added_token_gate, AddedNormLinear, false, false, true, through_output)
#undef ROWS_OF_INPUT

// output = residual + scale (input weight^T + bias), of the rows of input and residual that are selected, or of all
ROWS_KERNEL(linear_residual, LinearResidual) {
    extern __shared__ __align__(16) char shared[];
    using G = ROWS_GEOMETRY(false);
    const Linear& linear = arguments.linear;
    const ResidualOutput<T> output = residual_output<T>(arguments);
    char* activations = shared + G::BEHIND;
    if (!G::LATE) launch_next_kernel();
    Source<G> stream(linear, shared);
    stream.start();
    OwnPair<T, G, ResidualOutput<T>> pair(linear, output);
    wait_for_previous_kernel();
    pair.read(0);
    stage_input<T, G>(static_cast<const T*>(arguments.input), output.source, activations, linear);
    multiply_staged(linear, stream, pair, activations, reinterpret_cast<float*>(shared + G::AREAS_BEGIN));
}
#undef ROWS_KERNEL
#undef ROWS_GEOMETRY

}  // namespace packed
}  // namespace decode
