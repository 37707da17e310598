// The kernels of linear layers over packed weights of up to eight rows of activations, by packed_rows.cuh.
#include "decode/packed_rows.cuh"
#include "shared/clusters.cuh"

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
struct TokenBlock {
    AddedNormLinear gate;
    LinearResidual projection;
};
static_assert(sizeof(TokenBlock) == HOST_TOKEN_BLOCK_BYTES, "as the host's structure");

// added_token_gate, then linear_residual of what that gives, by one cluster of blocks: all weights of both, which are small,
// are on their way before the previous kernel is done, the gate's last. Shared memory as of the gate, then rings of the other.
ROWS_KERNEL(token_block, TokenBlock) {
    extern __shared__ __align__(16) char shared[];
    using G = ROWS_GEOMETRY(false);
    static_assert(G::DEPTH > 0 && !G::BRIEF && !LATE, "one geometry multiplies both, from rings");
    const Linear &gate = arguments.gate.linear, &projection = arguments.projection.linear;
    const ThroughOutput<T> gated = through_output<T>(arguments.gate);
    const auto inputs = one_input<T>(arguments.gate, G::AREAS_BEGIN);
    const int batch = G::ONE ? 1 : gate.batch;
    char* activations = shared + G::BEHIND;
    float* area = reinterpret_cast<float*>(shared + G::AREAS_BEGIN);
    launch_next_kernel();
    const char* rings = activations + SLICES * gate.steps * 64 * batch;
    Source<G>(projection, rings).start();
    Source<G> stream(gate, shared);
    stream.start();
    inputs.prefetch();
    OwnPair<T, G, ThroughOutput<T>> pair(gate, gated);
    wait_for_previous_kernel();
    pair.read(0);
    stage_rounded<T>(inputs, activations, batch, gate.columns, gate.steps);
    multiply_staged(gate, stream, pair, activations, area);
    cluster_barrier();  // all gates are in memory, and nobody reads the block's any more
    Source<G> next(projection, rings);
    next.go_on();
    const ResidualOutput<T> output = residual_output<T>(arguments.projection);
    OwnPair<T, G, ResidualOutput<T>> last(projection, output);
    last.read(0);
    stage_input<T, G>(static_cast<const T*>(arguments.projection.input), output.source, activations, projection);
    multiply_staged(projection, next, last, activations, area);
}
#undef ROWS_KERNEL
#undef ROWS_GEOMETRY

}  // namespace packed
}  // namespace decode
