// What stands before or between linear layers: RMS norm of many rows, once for all blocks of the linear layer that follows
// (the same bits as where the layer norms its own activations), rows as they are in T, both arranged for packed weights whose
// columns stand in another order, rows that are scaled, rows that are normed before they are added, and parts of rows that are
// normed where they are. And what stands behind gates and ups that are multiplied in launches of their own.
#include "decode/activations.cuh"
#include "decode/outputs.cuh"

namespace decode {

// What stage_normalized asks of a geometry: one row, and no ring of weights.
struct OneRow {
    static constexpr int HALVES = 1, STAGES = 1;
};

// output: [rows, stride] of T, of which `width` columns from `begin` on get the input; zeros behind them. steps: of the
// whole row, whose slices the squares are summed in, as where one kernel norms inputs that stand side by side. order, scales
// [width] (null: none): see Arranged.
struct Norm {
    NormedInput input;
    Kept kept;
    void* output;
    const int* order;
    const float* scales;
    int stride, width, begin, steps, next_early;
};
static_assert(sizeof(Norm) == HOST_NORM_BYTES, "as the host's structure");
constexpr int WEIGHTS_BEGIN = 8 * SUM_STRIDE * 4;  // in shared memory, behind the sums [8, SUM_STRIDE]
static_assert(WEIGHTS_BEGIN == HOST_NORM_SUMS_BYTES, "the host gives the norm its shared memory");
constexpr int MOST_PARTS = HOST_NORM_MOST_PARTS;  // of a row, that norm_parts norms

// Eight columns of a row from memory, of float or T.
template <typename T> __device__ __forceinline__ void load8(const void* row, bool is_float, int column, float (&values)[8]) {
    if (is_float) load8_float(static_cast<const float*>(row) + column, values);
    else unpack8<T>(__ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(row) + column)), values);
}

// Column k of a row of the output gets element order[k] of `row`, times scales[k], rounded once; columns from `width` on zeros.
template <typename T> __device__ __forceinline__ void arrange(const Norm& arguments, const T* row, T* output) {
    for (int column = threadIdx.x * 8; column < arguments.stride; column += THREADS * 8) {
        float values[8] = {};
        if (column < arguments.width) {
            int order[8];
            float scales[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) order[j] = arguments.order == nullptr ? column + j : __ldg(arguments.order + column + j);
#pragma unroll
            for (int j = 0; j < 8; ++j) scales[j] = arguments.scales == nullptr ? 1.f : __ldg(arguments.scales + column + j);
#pragma unroll
            for (int j = 0; j < 8; ++j) values[j] = to_float(row[order[j]]) * scales[j];
        }
        *reinterpret_cast<uint4*>(output + column) = pack8<T>(values);
    }
}

// Grid (1, rows). A weight of null: the values as they are. ARRANGED: the whole row, `begin` is 0; the output may be the input.
template <typename T, bool ARRANGED = false>
__global__ void __launch_bounds__(THREADS) norm(const __grid_constant__ Norm arguments) {
    extern __shared__ __align__(16) char shared[];
    const NormedInput& input = arguments.input;
    const size_t row = blockIdx.y;
    const int begin = arguments.begin, end = begin + arguments.width, steps = arguments.steps;
    const bool is_float = input.is_float != 0;
    // Of all of them, so that column c of the row is their column c, too.
    const long long first = static_cast<long long>(row) * input.stride - begin;
    const void* values = static_cast<const char*>(input.values) + first * static_cast<int>(is_float ? 4 : sizeof(T));
    T* kept = static_cast<T*>(arguments.kept.target);
    if (kept != nullptr) kept += static_cast<long long>(row) * arguments.kept.stride - begin;
    T* output = static_cast<T*>(arguments.output) + row * arguments.stride;
    T* own = ARRANGED ? reinterpret_cast<T*>(shared + WEIGHTS_BEGIN) + WARPS * steps * 32 : output;
    int written = WARPS * steps * 32;
    if (arguments.next_early) launch_next_kernel();
    if (input.weight != nullptr) {
        const NormInputs<T, 1> inputs{
            {values}, {is_float}, {static_cast<const T*>(input.weight)}, {0}, input.epsilon, input.offset, end - begin, kept,
            0, arguments.kept.raw != 0};
        T* norm_weights = reinterpret_cast<T*>(shared + WEIGHTS_BEGIN);
        inputs.copy_weights(norm_weights, end - begin);
        commit_copies();
        wait_for_previous_kernel();
        if (!arguments.next_early) launch_next_kernel();
        stage_normalized<T, 1, 1, OneRow>(
            inputs, norm_weights - begin, reinterpret_cast<float*>(shared), reinterpret_cast<char*>(own), 1, end, steps,
            arguments.stride, begin);
    } else {
        wait_for_previous_kernel();
        if (!arguments.next_early) launch_next_kernel();
        written = end;
        for (int column = begin + threadIdx.x * 8; column < end; column += THREADS * 8) {
            float eight[8];
            load8<T>(values, is_float, column, eight);
            const uint4 packed = pack8<T>(eight);
            *reinterpret_cast<uint4*>(own + column) = packed;
            if (kept != nullptr) *reinterpret_cast<uint4*>(kept + column) = packed;
        }
    }
    if (ARRANGED) {
        __syncthreads();
        arrange<T>(arguments, own, output);
        return;
    }
    for (int column = written + threadIdx.x * 8; column < arguments.stride; column += THREADS * 8)
        *reinterpret_cast<uint4*>(own + column) = make_uint4(0, 0, 0, 0);
}

// output [count] float = factor times input [count] of T; count: a multiple of 8. The grid covers it.
template <typename T>
__global__ void __launch_bounds__(THREADS) scale_rows(const T* input, float factor, float* output, int count) {
    launch_next_kernel();
    wait_for_previous_kernel();
    const int first = (blockIdx.x * THREADS + threadIdx.x) * 8;
    if (first >= count) return;
    float values[8];
    load8<T>(input, false, first, values);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] *= factor;
    float4* target = reinterpret_cast<float4*>(output + first);
    target[0] = make_float4(values[0], values[1], values[2], values[3]);
    target[1] = make_float4(values[4], values[5], values[6], values[7]);
}

// x [count] float = cap tanh(x inverse_cap), in place, whatever T is. The grid covers it.
template <typename T>
__global__ void __launch_bounds__(THREADS) cap_rows(float* x, float cap, float inverse_cap, int count) {
    launch_next_kernel();
    wait_for_previous_kernel();
    const int place = blockIdx.x * THREADS + threadIdx.x;
    if (place < count) x[place] = cap * tanhf(__ldcg(x + place) * inverse_cap);
}

// output [rows, width] of T = activation(gate) up of input [rows, 2 width], gates, then ups; width: a multiple of 8. Grid
// (ceil(width / (8 THREADS)), rows).
template <typename T>
__global__ void __launch_bounds__(THREADS) gate_rows(const float* input, T* output, int width, int activation) {
    launch_next_kernel();
    wait_for_previous_kernel();
    const int column = (blockIdx.x * THREADS + threadIdx.x) * 8;
    if (column >= width) return;
    const float* gates = input + static_cast<size_t>(blockIdx.y) * 2 * width + column;
    const GatedOutput<T> gated{output, activation};
    float own[8], ups[8];
    load8_float(gates, own), load8_float(gates + width, ups);
    unsigned pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
        pairs[j] = pack<T>(gated.value(own[2 * j], ups[2 * j]), gated.value(own[2 * j + 1], ups[2 * j + 1]));
    *reinterpret_cast<uint4*>(output + static_cast<size_t>(blockIdx.y) * width + column) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// What all threads of a block hold, added in the order of its warps.
__device__ __forceinline__ float sum_of_warps(float value, float (&sums)[WARPS]) {
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += sums[warp];
    return total;
}

// output [rows, width] float = residual + the normed input, not rounded; a weight of null: the input as it is. selected:
// which of the `tokens` rows that the residual has of a sequence each row gets (null: it has as many rows as the input).
// SCALED: times `factor` [1]. Grid (1, rows); what a thread writes it has read.
struct NormResidual {
    NormedInput input;
    const void* residual;
    const int* selected;
    float* output;
    int width, tokens, adds_float;
    const float* factor;
};
static_assert(sizeof(NormResidual) == HOST_NORM_RESIDUAL_BYTES, "as the host's structure");

template <typename T, bool SCALED = false>
__global__ void __launch_bounds__(THREADS) norm_residual(const __grid_constant__ NormResidual arguments) {
    __shared__ float sums[WARPS];
    const NormedInput& input = arguments.input;
    const size_t row = blockIdx.y;
    const bool is_float = input.is_float != 0, adds_float = arguments.adds_float != 0;
    launch_next_kernel();
    wait_for_previous_kernel();
    const void* values = static_cast<const char*>(input.values) + row * input.stride * (is_float ? 4 : sizeof(T));
    const size_t source = arguments.selected == nullptr ? row : row * arguments.tokens + __ldcg(arguments.selected + row);
    const void* residual =
        static_cast<const char*>(arguments.residual) + source * arguments.width * (adds_float ? 4 : sizeof(T));
    const bool norms = input.weight != nullptr;
    float squares = 0.f;
    for (int column = threadIdx.x * 8; norms && column < arguments.width; column += THREADS * 8) {
        float eight[8];
        load8<T>(values, is_float, column, eight);
#pragma unroll
        for (int j = 0; j < 8; ++j) squares = fmaf(eight[j], eight[j], squares);
    }
    const float total = sum_of_warps(squares, sums);
    const float factor = norms ? rsqrtf(total / static_cast<float>(arguments.width) + input.epsilon) : 1.f;
    float* output = arguments.output + row * arguments.width;
    for (int column = threadIdx.x * 8; column < arguments.width; column += THREADS * 8) {
        float eight[8], before[8], weight[8];
        load8<T>(values, is_float, column, eight);
        load8<T>(residual, adds_float, column, before);
        if (norms) load8<T>(input.weight, false, column, weight);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            eight[j] = fmaf(eight[j] * factor, norms ? weight[j] + input.offset : 1.f, before[j]);
#pragma unroll
        for (int j = 0; SCALED && j < 8; ++j) eight[j] *= __ldg(arguments.factor);
        float4* target = reinterpret_cast<float4*>(output + column);
        target[0] = make_float4(eight[0], eight[1], eight[2], eight[3]);
        target[1] = make_float4(eight[4], eight[5], eight[6], eight[7]);
    }
}

// Parts of rows of float, `widths` columns each from where `values` points to, are normed where they are, not rounded. Grid
// (parts, rows); what a thread writes it has read. The order of the sum depends on the width alone. Where ranks share the
// parts, `squares` [rows, SQUARE_SUMS] are the sums of all their squares, and `wholes` how many there are, or 0 of a part that
// another rank counts.
struct NormParts {
    NormedInput parts[MOST_PARTS];
    int widths[MOST_PARTS], next_early, wholes[MOST_PARTS];
    float* squares;
};
constexpr int SQUARE_SUMS = HOST_SQUARE_SUMS;
enum PartsOf { ONE_GPU, SQUARES, RANKS };
static_assert(sizeof(NormParts) == HOST_NORM_PARTS_BYTES, "as the host's structure");

// OF: one GPU's are normed; of ranks' the squares of this one's are added, or they are normed by the sums of all.
template <typename T, int OF = ONE_GPU>
__global__ void __launch_bounds__(THREADS) norm_parts(const __grid_constant__ NormParts arguments) {
    __shared__ float sums[WARPS];
    const NormedInput& part = arguments.parts[blockIdx.x];
    const int width = arguments.widths[blockIdx.x];
    float* values = static_cast<float*>(const_cast<void*>(part.values)) + static_cast<size_t>(blockIdx.y) * part.stride;
    if (arguments.next_early) launch_next_kernel();
    wait_for_previous_kernel();
    if (!arguments.next_early) launch_next_kernel();
    float squares = 0.f;
    for (int column = threadIdx.x * 8; OF != RANKS && column < width; column += THREADS * 8) {
        float eight[8];
        load8_float(values + column, eight);
#pragma unroll
        for (int j = 0; j < 8; ++j) squares = fmaf(eight[j], eight[j], squares);
    }
    float* shared_squares = arguments.squares + static_cast<size_t>(blockIdx.y) * SQUARE_SUMS;
    const float total = OF == RANKS ? __ldcg(shared_squares + blockIdx.x) : sum_of_warps(squares, sums);
    const int whole = OF == ONE_GPU ? width : arguments.wholes[blockIdx.x];
    if (OF == SQUARES) {
        const int place = threadIdx.x == 0 ? blockIdx.x : gridDim.x + threadIdx.x - 1;  // behind the last part zeros
        if (threadIdx.x == 0 || (blockIdx.x == 0 && place < SQUARE_SUMS))
            shared_squares[place] = threadIdx.x == 0 && whole > 0 ? total : 0.f;
        return;
    }
    const float factor = rsqrtf(total / static_cast<float>(whole) + part.epsilon);
    for (int column = threadIdx.x * 8; column < width; column += THREADS * 8) {
        float eight[8], weight[8];
        load8_float(values + column, eight);
        load8<T>(part.weight, false, column, weight);
#pragma unroll
        for (int j = 0; j < 8; ++j) eight[j] = eight[j] * factor * (weight[j] + part.offset);
        float4* target = reinterpret_cast<float4*>(values + column);
        target[0] = make_float4(eight[0], eight[1], eight[2], eight[3]);
        target[1] = make_float4(eight[4], eight[5], eight[6], eight[7]);
    }
}

}  // namespace decode
