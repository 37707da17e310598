// Linear layers of any number of rows of activations, as prompts have: tiles of weight rows times rows of activations.
//
// Every sum has the order of decode/linear.cu: slices of K from zero, four slices a group, then the groups. So a row
// gets the bits of the decode step. A warp has its own rows of activations and weight rows, for all of K; it keeps the
// sums of the slice and of the group in registers, and those of all groups there or, of large tiles, in shared memory.
// Blocks stay: each walks over its tiles, and the next tile's first columns are copied while the last one's outputs are
// written. Where there are fewer tiles than multiprocessors, each group has warps of its own.
#include "decode/many_rows.cuh"
#include "prefill/linear_blocks.cuh"
#include "shared/plain_activations.cuh"

namespace prefill {

// What an activation without a gate makes of the sums, rounded.
template <typename T> struct ActivatedOutput {
    T* output;
    static __device__ float value(float sum) { return plain_activation(sum, HOST_ACTIVATION); }
    __device__ float before(int, int, int) const { return 0.f; }
    __device__ void operator()(int b, int n, int rows, const float (&sum)[1], float) const {
        output[static_cast<size_t>(b) * rows + n] = from_float<T>(value(sum[0]));
    }
    __device__ float2 before_two(int, int, int) const { return make_float2(0.f, 0.f); }
    __device__ void two(int b, int n, int rows, const float2 (&sum)[1], float2) const {
        write_two(
            output + static_cast<size_t>(b) * rows + n, make_float2(value(sum[0].x), value(sum[0].y)), n, rows);
    }
};

// The products of LoRA adapters' A as an output of their own: columns n, which is even, and n + 1 of all places. A
// thread that writes them one by one writes both, one behind the other.
template <typename T> struct LowOutput {
    RowAdapters<T> adapters;
    mutable float even;
    __device__ float before(int, int, int) const { return 0.f; }
    __device__ void operator()(int b, int n, int, const float (&sum)[1], float) const {
        if (n % 2 == 0) even = sum[0];
        else adapters.leave(b, n - 1, make_float2(even, sum[0]));
    }
    __device__ float2 before_two(int, int, int) const { return make_float2(0.f, 0.f); }
    __device__ void two(int b, int n, int, const float2 (&sum)[1], float2) const { adapters.leave(b, n, sum[0]); }
};

#define PROMPT_KERNEL(NAME)                                                                                            \
    template <typename T, int ROW_TILES, int COLUMN_TILES, int ROW_WARPS, int COLUMN_WARPS, int BLOCKS, int TOTALS,    \
              bool ADAPTED, int SCALES = 0, int MODE = 0>                                                              \
    __global__ void __launch_bounds__(32 * ROW_WARPS * COLUMN_WARPS * (TOTALS == JOINED ? GROUPS : 1), BLOCKS) NAME(   \
        const __grid_constant__ TiledLinear arguments)
#define PROMPT_GEOMETRY(PAIRED)                                                                                        \
    using G = Geometry<ROW_TILES, COLUMN_TILES, ROW_WARPS, COLUMN_WARPS, TOTALS, PAIRED, ADAPTED, SCALES, MODE>;       \
    const Linear& linear = arguments.linear;                                                                           \
    const T *weight = static_cast<const T*>(linear.weight), *bias = static_cast<const T*>(linear.bias)

// output = scale (input weight^T + bias)
PROMPT_KERNEL(linear) {
    PROMPT_GEOMETRY(false);
    const FloatOutput output = float_output(arguments.output, linear);
    multiply<T, G>(arguments, weight, linear.rows, bias, output);
}

// output = activation(input weight^T + bias), rounded
PROMPT_KERNEL(activated) {
    PROMPT_GEOMETRY(false);
    const ActivatedOutput<T> output{static_cast<T*>(arguments.output)};
    multiply<T, G>(arguments, weight, linear.rows, bias, output);
}

// output = activation(gate) up of input weight^T + bias
PROMPT_KERNEL(gate_up) {
    PROMPT_GEOMETRY(true);
    const GatedOutput<T> output{static_cast<T*>(arguments.output), arguments.activation};
    multiply<T, G>(arguments, weight, linear.rows, bias, output);
}

// output = residual + scale (input weight^T + bias), of the rows of input and residual that are selected, or of all.
PROMPT_KERNEL(linear_residual) {
    PROMPT_GEOMETRY(false);
    multiply<T, G>(arguments, weight, linear.rows, bias, residual_output<T>(arguments));
}

// The products of LoRA adapters' A, which the kernels above take; the next launch's are cleared.
PROMPT_KERNEL(low_products) {
    PROMPT_GEOMETRY(false);
    const RowAdapters<T> adapters(linear);
    weight = static_cast<const T*>(linear.adapters.a), bias = nullptr;
    multiply<T, G>(arguments, weight, adapters.all_low_rows(), bias, LowOutput<T>{adapters, 0.f});
    adapters.clear_next();
}
#undef PROMPT_KERNEL
#undef PROMPT_GEOMETRY

}  // namespace prefill
