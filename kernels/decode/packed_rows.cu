// The kernels of linear layers over packed weights of up to eight rows of activations, by packed_rows.cuh.
#include "decode/packed_rows.cuh"
#include "shared/clusters.cuh"

namespace decode {
namespace packed {

// output = scale (norm(input) weight^T + bias)
ROWS_KERNEL(norm_linear, NormLinear) {
    using G = ROWS_GEOMETRY(false);
    const FloatOutput output = float_output(arguments.output, arguments.linear);
    multiply_input<T, G, true, false>(arguments, output);
}

// The same of the rounded input.
ROWS_KERNEL(rounded_linear, NormLinear) {
    using G = ROWS_GEOMETRY(false);
    const FloatOutput output = float_output(arguments.output, arguments.linear);
    multiply_input<T, G, false, true>(arguments, output);
}

// output = activation(gate) up of norm(input) weight^T + bias
ROWS_KERNEL(norm_gate_up, NormLinear) {
    using G = ROWS_GEOMETRY(true);
    const GatedOutput<T> output{static_cast<T*>(arguments.output), arguments.activation};
    multiply_input<T, G, true, false>(arguments, output);
}

// The same of the rounded input.
ROWS_KERNEL(rounded_gate_up, NormLinear) {
    using G = ROWS_GEOMETRY(true);
    const GatedOutput<T> output{static_cast<T*>(arguments.output), arguments.activation};
    multiply_input<T, G, false, true>(arguments, output);
}

// The same of the input as it is.
ROWS_KERNEL(gate_up, NormLinear) {
    using G = ROWS_GEOMETRY(true);
    const GatedOutput<T> output{static_cast<T*>(arguments.output), arguments.activation};
    multiply_input<T, G, false, false>(arguments, output);
}

// The same of inputs that are normed and added to a residual first.
ROWS_KERNEL(added_norm_linear, AddedNormLinear) {
    using G = ROWS_GEOMETRY(false);
    const FloatOutput output = float_output(arguments.output, arguments.linear);
    multiply_input<T, G, true, false>(arguments, output);
}
ROWS_KERNEL(added_rounded_linear, AddedNormLinear) {
    using G = ROWS_GEOMETRY(false);
    const FloatOutput output = float_output(arguments.output, arguments.linear);
    multiply_input<T, G, false, true>(arguments, output);
}
ROWS_KERNEL(added_norm_gate_up, AddedNormLinear) {
    using G = ROWS_GEOMETRY(true);
    const GatedOutput<T> output{static_cast<T*>(arguments.output), arguments.activation};
    multiply_input<T, G, true, false>(arguments, output);
}
ROWS_KERNEL(added_rounded_gate_up, AddedNormLinear) {
    using G = ROWS_GEOMETRY(true);
    const GatedOutput<T> output{static_cast<T*>(arguments.output), arguments.activation};
    multiply_input<T, G, false, true>(arguments, output);
}

// output = activation(input weight^T + bias) times other rows, of the rounded input
ROWS_KERNEL(token_gate, NormLinear) {
    using G = ROWS_GEOMETRY(false);
    multiply_input<T, G, false, true>(arguments, through_output<T>(arguments));
}
ROWS_KERNEL(added_token_gate, AddedNormLinear) {
    using G = ROWS_GEOMETRY(false);
    multiply_input<T, G, false, true>(arguments, through_output<T>(arguments));
}

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
