// What the kernels of few rows take: those of linear.cu, and of packed_rows.cu.
#pragma once
#include "decode/activations.cuh"
#include "decode/outputs.cuh"

namespace decode {

// What the kernels that norm take. inputs: one, or two side by side, or one and what its gates multiply. next_early: whether the
// next kernel may start at once, or only when the previous one has finished. output: float, or T of gates and ups. beside: the
// previous kernel, of which this one takes nothing, has let it start so late: it waits in the end.
struct NormLinear {
    NormedInput inputs[2];
    Linear linear;
    Kept kept;
    void* output;
    int next_early, activation, beside;
};

// What an input of float becomes before it is taken, see AddedTo of contract.py: residual and output of float, as wide as the
// input, weight [columns] of T; factor (null: 1) [1].
struct AddedTo {
    const float* residual;
    float* output;
    const void* weight;
    const float* factor;
    float epsilon, offset;
};

struct AddedNormLinear : NormLinear {
    AddedTo added;
};

// What linear_residual takes. input: of T; selected: see SelectedRows; stage: activations are staged, not streamed.
struct LinearResidual {
    Linear linear;
    Kept kept;
    const void *input, *residual;
    float* output;
    const int* selected;
    int residual_float, tokens, stage;
};
static_assert(sizeof(NormLinear) == HOST_NORM_LINEAR_BYTES && sizeof(AddedNormLinear) == HOST_ADDED_LINEAR_BYTES && sizeof(LinearResidual) == HOST_LINEAR_RESIDUAL_BYTES,
              "as the host's structures");

// An input that is normed and added to a residual as norm_residual does it, with the same bits, by each block for itself; the
// first leaves what becomes of it. Squares are added by all threads: `sums` [rows, WARPS] in shared memory, of which nothing
// else is needed from `begin` to `end`, or to the block's next barrier behind all loads.
template <typename T> struct AddedInputs : NormInputs<T, 1> {
    AddedTo added;
    float* sums;

    // Constants that no step before has left near: a step's weights are more than the second-level cache holds.
    __device__ void prefetch() const {
        const auto bring = [](const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); };
        for (int column = threadIdx.x * 64; column < this->width; column += THREADS * 64)
            bring(static_cast<const T*>(added.weight) + column);
        if (threadIdx.x == 0 && added.factor != nullptr) bring(added.factor);
    }
    // What a thread takes first comes with the squares, not behind their barrier: eight columns of a row.
    struct Ahead {
        float values[8], before[8], factor;
        uint4 weights;
        int row, column;
    };
    __device__ __forceinline__ void read(Ahead& ahead, int row, int column) const {
        NormInputs<T, 1>::load(row, column, ahead.values);
        load8_float(added.residual + static_cast<size_t>(row) * this->width + column, ahead.before);
        ahead.weights = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(added.weight) + column));
        ahead.factor = added.factor == nullptr ? 1.f : __ldg(added.factor);
        ahead.row = row, ahead.column = column;
    }
    // `row`, `column` (-1: none): what the thread takes first.
    __device__ Ahead begin(int batch, int row, int column) const {
        Ahead ahead;
        ahead.column = -1;
        if (row < batch && column >= 0) read(ahead, row, column);
#pragma unroll 1
        for (int each = 0; each < batch; ++each) {
            float squares = 0.f;
            for (int place = threadIdx.x * 8; place < this->width; place += THREADS * 8) {
                float eight[8];
                NormInputs<T, 1>::load(each, place, eight);
#pragma unroll
                for (int j = 0; j < 8; ++j) squares = fmaf(eight[j], eight[j], squares);
            }
            squares = warp_sum(squares);
            if (threadIdx.x % 32 == 0) sums[each * WARPS + threadIdx.x / 32] = squares;
        }
        __syncthreads();
        return ahead;
    }
    __device__ void end() const { __syncthreads(); }
    __device__ void load(int row, int column, float (&target)[8], Ahead& ahead) const {
        if (ahead.column != column || ahead.row != row) read(ahead, row, column);
        float weights[8];
        unpack8<T>(ahead.weights, weights);
        float total = 0.f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) total += sums[row * WARPS + warp];
        const float own = rsqrtf(total / static_cast<float>(this->width) + added.epsilon);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            target[j] = fmaf(ahead.values[j] * own, weights[j] + added.offset, ahead.before[j]) * ahead.factor;
        if (blockIdx.x != 0) return;
        float4* output = reinterpret_cast<float4*>(added.output + static_cast<size_t>(row) * this->width + column);
        output[0] = make_float4(target[0], target[1], target[2], target[3]);
        output[1] = make_float4(target[4], target[5], target[6], target[7]);
    }
};

// `sums_begin`: where the sums of AddedInputs begin in shared memory.
template <typename T> __device__ __forceinline__ NormInputs<T, 1> one_input(const NormLinear& arguments, int sums_begin = 0) {
    const NormedInput& input = arguments.inputs[0];
    const Kept& kept = arguments.kept;
    return {{input.values}, {input.is_float != 0}, {static_cast<const T*>(input.weight)}, {input.stride}, input.epsilon,
            input.offset, arguments.linear.columns, static_cast<T*>(kept.target), kept.stride, kept.raw != 0};
}

template <typename T> __device__ __forceinline__ AddedInputs<T> one_input(const AddedNormLinear& arguments, int sums_begin) {
    extern __shared__ __align__(16) char shared[];
    float* sums = reinterpret_cast<float*>(shared + sums_begin);
    return {one_input<T>(static_cast<const NormLinear&>(arguments)), arguments.added, sums};
}

template <typename T> __device__ __forceinline__ FloatOutput float_output(const NormLinear& arguments) {
    return float_output(arguments.output, arguments.linear);
}
template <typename T> __device__ __forceinline__ GatedOutput<T> gated_output(const NormLinear& arguments) {
    return {static_cast<T*>(arguments.output), arguments.activation};
}
template <typename T> __device__ __forceinline__ ThroughOutput<T> through_output(const NormLinear& arguments) {
    const NormedInput& through = arguments.inputs[1];
    return {gated_output<T>(arguments), static_cast<const float*>(through.values), through.stride};
}

template <typename T> __device__ __forceinline__ ResidualOutput<T> residual_output(const LinearResidual& arguments) {
    return {arguments.output, arguments.linear.scale, arguments.linear.width, arguments.residual, arguments.residual_float != 0,
            {arguments.selected, arguments.tokens}, static_cast<T*>(arguments.kept.target), arguments.kept.stride};
}

}  // namespace decode
