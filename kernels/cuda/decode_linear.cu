// Linear layers of decode, verify and draft steps: a few rows of activations times a weight matrix [N, K] that is
// streamed once from memory. What limits them is memory, so everything serves to keep loads in flight: each thread copies
// weights asynchronously into a ring of its own in shared memory, the first ones before the kernel waits for its predecessor.
//
// A block of 16 warps computes units of 8 or 16 weight rows (or of 8 gate and 8 up rows); the warps split K, each
// multiplies its slice on the tensor cores, and the 16 partial sums are added in a fixed order, in groups of four. The
// order of every sum depends on K alone: a row gets the same bits in every batch, from the narrow kernels (up to 8 rows,
// two blocks on a multiprocessor), from the wide ones (up to 16 rows, one block with a deeper ring, which reads the
// activations half as often) and from those of decode_tiled_linear.cu.
#include "cuda/decode_activations.cuh"
#include "cuda/decode_outputs.cuh"

namespace decode {

constexpr int TILE_ROWS = 8;  // weight rows of one tensor-core instruction
constexpr int NARROW_DEPTH = 4, WIDE_DEPTH = 8;  // 16-byte copies of weights that a thread has in flight

// PAIRED: a unit's tiles are gate and up rows, which lie `rows` apart; else they follow each other.
template <int TILES_, bool PAIRED_, int HALVES_, int DEPTH> struct Geometry {
    static constexpr int TILES = TILES_, HALVES = HALVES_;
    static constexpr bool PAIRED = PAIRED_;
    static constexpr int STAGES = DEPTH / TILES;
    static constexpr int UNIT = PAIRED ? TILE_ROWS : TILES * TILE_ROWS;  // output columns of a unit
    static constexpr int SUMS = PAIRED ? TILES : 1;                      // that an output is made of
    static constexpr int PARTIALS = TILES * HALVES * 64;                 // floats that a warp leaves of a unit
};

// What a thread copies: the steps of its warp through the warp's slice of K, unit after unit.
template <typename T, typename G> struct Weights {
    const T* weight;
    const T* row[G::TILES];
    unsigned ring;  // the thread's place in shared memory
    int rows, columns, steps, column, step, unit;

    __device__ void start_unit() {
#pragma unroll
        for (int tile = 0; tile < G::TILES; ++tile) {
            const int line = min(unit * G::UNIT + (G::PAIRED ? 0 : tile * TILE_ROWS) + own_row(), rows - 1);
            row[tile] = weight + static_cast<size_t>(line + (G::PAIRED ? tile * rows : 0)) * columns + column;
        }
    }
    __device__ unsigned place(int stage, int tile) const { return ring + (stage * G::TILES + tile) * THREADS * 16; }
    // Where no weights are left, zeros are put into the ring.
    __device__ void copy(int stage) const {
        const bool exists = unit * G::UNIT < rows && column + step * 32 < columns;
#pragma unroll
        for (int tile = 0; tile < G::TILES; ++tile) copy_async_16(place(stage, tile), row[tile] + step * 32, exists);
    }
    __device__ void advance() {
        if (++step == steps) {
            step = 0;
            unit += gridDim.x;
            start_unit();
        }
    }
};

template <typename T, typename G>
__device__ __forceinline__ Weights<T, G> start_weights(const T* weight, char* ring, int rows, int columns, int steps) {
    Weights<T, G> weights;
    weights.weight = weight, weights.rows = rows, weights.columns = columns, weights.steps = steps;
    weights.ring = shared_address(ring) + threadIdx.x * 16;
    weights.column = own_column(steps), weights.step = 0, weights.unit = blockIdx.x;
    weights.start_unit();
#pragma unroll
    for (int stage = 0; stage < G::STAGES; ++stage) {
        weights.copy(stage);
        commit_copies();
        weights.advance();
    }
    return weights;
}

// All units of the block; every group of copies holds one step of weights and, where they are streamed, activations.
template <typename T, typename G, typename Activations, typename Output>
__device__ __forceinline__ void multiply_units(
    Weights<T, G>& weights, const Activations& activations, const T* bias, const Output& output, float* partial,
    int batch) {
    const int warp = threadIdx.x / 32, quad = own_quad(), rows = weights.rows, steps = weights.steps;
    int buffer = 0, slot = 0;
    for (int unit = blockIdx.x; unit * G::UNIT < rows; unit += gridDim.x) {
        float sum[G::TILES][2 * G::HALVES] = {};
#pragma unroll 4
        for (int step = 0; step < steps; ++step) {
            wait_for_copies<G::STAGES - 1>();
            unsigned x[G::HALVES] = {}, y[G::HALVES] = {}, z[G::HALVES] = {}, w[G::HALVES] = {};
#pragma unroll
            for (int half = 0; half < G::HALVES; ++half)
                if (own_row() + 8 * half < batch) {
                    const uint4 a = read_shared_16(activations.place(slot, step) + half * 512);
                    x[half] = a.x, y[half] = a.y, z[half] = a.z, w[half] = a.w;
                }
#pragma unroll
            for (int tile = 0; tile < G::TILES; ++tile) {
                const uint4 b = read_shared_16(weights.place(slot, tile));
                multiply_add(sum[tile], x, y, b.x, b.y, T());
                multiply_add(sum[tile], z, w, b.z, b.w, T());
            }
            weights.copy(slot);
            activations.copy(slot, weights.step);
            commit_copies();
            weights.advance();
            slot = (slot + 1) % G::STAGES;
        }
        float* mine = partial + (buffer * WARPS + warp) * G::PARTIALS;
#pragma unroll
        for (int tile = 0; tile < G::TILES; ++tile)
#pragma unroll
            for (int half = 0; half < G::HALVES; ++half)
                if (own_row() + 8 * half < batch)
                    *reinterpret_cast<float2*>(mine + (tile * G::HALVES + half) * 64 + own_row() * 8 + quad * 2) =
                        make_float2(sum[tile][2 * half], sum[tile][2 * half + 1]);
        __syncthreads();
        if (threadIdx.x < batch * G::UNIT) {
            const int place = threadIdx.x % G::UNIT, b = threadIdx.x / G::UNIT, row = unit * G::UNIT + place;
            const float* theirs = partial + buffer * WARPS * G::PARTIALS + b * 8 + place % 8;
            float total[G::SUMS] = {};
#pragma unroll
            for (int first = 0; first < WARPS; first += SLICES_OF_A_GROUP)
#pragma unroll
                for (int s = 0; s < G::SUMS; ++s) {
                    const float* slices = theirs + (G::PAIRED ? s : place / 8) * G::HALVES * 64;
                    float group = 0.f;
#pragma unroll
                    for (int i = first; i < first + SLICES_OF_A_GROUP; ++i) group += slices[i * G::PARTIALS];
                    total[s] += group;
                }
            if (row < rows) {
#pragma unroll
                for (int s = 0; s < G::SUMS; ++s)
                    if (bias != nullptr) total[s] += to_float(bias[s * rows + row]);
                output(b, row, rows, total);
            }
        }
        buffer ^= 1;  // the next unit's partial sums; this buffer's turn comes after another barrier
    }
    wait_for_copies<0>();
}

// Linear of what is normalized. rows: N, or half of it where PAIRED. next_early: whether the next kernel may start at
// once, or only when the previous one has finished. HELD 0: inputs of T alone, normalized in shared memory.
template <typename T, int PARTS, int HELD, typename G, typename Output>
__device__ __forceinline__ void norm_linear(
    const T* weight, const T* bias, const NormInputs<T, PARTS>& inputs, const Output& output, int batch, int rows,
    int columns, int steps, bool next_early) {
    extern __shared__ __align__(16) char shared[];
    char* ring = shared;                                                                 // [DEPTH, THREADS] of 16 bytes
    float* partial = reinterpret_cast<float*>(ring + G::STAGES * G::TILES * THREADS * 16);  // [2, WARPS, PARTIALS]
    float* sums = partial + 2 * WARPS * G::PARTIALS;                                     // [PARTS, rows, SUM_STRIDE]
    T* norm_weights = reinterpret_cast<T*>(sums + PARTS * G::HALVES * 8 * SUM_STRIDE);   // [WARPS, steps, 32]
    char* activations = reinterpret_cast<char*>(norm_weights + WARPS * steps * 32);      // [WARPS, steps, batch, 64 bytes]

    if (next_early) launch_next_kernel();
    inputs.copy_weights(norm_weights, columns);
    Weights<T, G> weights = start_weights<T, G>(weight, ring, rows, columns, steps);
    wait_for_previous_kernel();
    if (!next_early) launch_next_kernel();
    if constexpr (HELD == 0)
        stage_normalized_in_place<T, G>(inputs, norm_weights, sums, activations, batch, columns, steps);
    else
        stage_normalized<T, PARTS, HELD, G>(inputs, norm_weights, sums, activations, batch, columns, steps);
    multiply_units<T, G>(weights, staged_for_lane(activations, batch, steps), bias, output, partial, batch);
}

// Linear of what is multiplied as it is, staged once for all units, or streamed.
template <typename T, typename G>
__device__ __forceinline__ void linear_residual(
    const T* weight, const T* bias, const T* input, const ResidualOutput<T>& output, int batch, int rows, int columns,
    int steps, bool stage) {
    extern __shared__ __align__(16) char shared[];
    char* ring = shared;                                                                 // [DEPTH, THREADS] of 16 bytes
    float* partial = reinterpret_cast<float*>(ring + G::STAGES * G::TILES * THREADS * 16);  // [2, WARPS, PARTIALS]
    // [WARPS, steps, batch, 64 bytes], or [STAGES, WARPS, batch, 64 bytes]
    char* staged = reinterpret_cast<char*>(partial + 2 * WARPS * G::PARTIALS);

    launch_next_kernel();
    Weights<T, G> weights = start_weights<T, G>(weight, ring, rows, columns, steps);
    wait_for_previous_kernel();
    if (stage) {
        stage_as_is(input, output.source, staged, batch, columns, steps);
        multiply_units<T, G>(weights, staged_for_lane(staged, batch, steps), bias, output, partial, batch);
        return;
    }
    Streamed<T, G::HALVES> activations;
    activations.address =
        shared_address(staged + (threadIdx.x / 32 * batch + own_row()) * 64 + own_quad() * 16);
    activations.stage_bytes = WARPS * batch * 64, activations.columns = columns, activations.column = weights.column;
#pragma unroll
    for (int half = 0; half < G::HALVES; ++half) {
        const int row = own_row() + 8 * half;
        activations.exists[half] = row < batch;
        activations.row[half] = input + weights.column;
        if (row < batch) activations.row[half] += static_cast<size_t>(output.source(row)) * columns;
    }
#pragma unroll
    for (int stage = 0; stage < G::STAGES; ++stage) activations.copy(stage, stage % steps);
    commit_copies();
    wait_for_copies<0>();
    multiply_units<T, G>(weights, activations, bias, output, partial, batch);
}

using Narrow = Geometry<1, false, 1, NARROW_DEPTH>;
using NarrowPairs = Geometry<2, true, 1, NARROW_DEPTH>;
using Wide = Geometry<1, false, 2, WIDE_DEPTH>;
using WidePairs = Geometry<2, true, 2, WIDE_DEPTH>;
using WideTwice = Geometry<2, false, 2, WIDE_DEPTH>;

#define DECODE_LINEAR_KERNELS(NAME, T, WIDTH, GEOMETRY, PAIRS, RESIDUAL, BLOCKS, HELD)                                 \
    extern "C" __global__ void __launch_bounds__(decode::THREADS, BLOCKS) decode_norm_linear##WIDTH##_##NAME(          \
        const T* weight, const T* bias, const void* input, int input_float, const T* norm_weight, float epsilon,       \
        float* output, int batch, int rows, int columns, int steps, int next_early, T* kept, int kept_stride,          \
        int keeps_raw) {                                                                                               \
        decode::norm_linear<T, 1, HELD, decode::GEOMETRY>(                                                             \
            weight, bias,                                                                                              \
            decode::NormInputs<T, 1>{                                                                                  \
                {input}, {input_float != 0}, {norm_weight}, epsilon, columns, kept, kept_stride, keeps_raw != 0},      \
            decode::FloatOutput{output}, batch, rows, columns, steps, next_early != 0);                                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(decode::THREADS, BLOCKS) decode_norm_gate_up##WIDTH##_##NAME(         \
        const T* weight, const T* bias, const void* input, int input_float, const T* norm_weight, float epsilon,       \
        T* output, int batch, int rows, int columns, int steps) {                                                      \
        decode::norm_linear<T, 1, HELD, decode::PAIRS>(                                                                \
            weight, bias,                                                                                              \
            decode::NormInputs<T, 1>{{input}, {input_float != 0}, {norm_weight}, epsilon, columns, nullptr, 0, false}, \
            decode::SiluOutput<T>{output}, batch, rows, columns, steps, true);                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(decode::THREADS, BLOCKS) decode_linear_residual##WIDTH##_##NAME(      \
        const T* weight, const T* bias, const T* input, const void* residual, int residual_float, float* output,       \
        int batch, int rows, int columns, int steps, int stage, const int* selected, int tokens, T* features,          \
        int feature_stride) {                                                                                          \
        decode::linear_residual<T, decode::RESIDUAL>(                                                                  \
            weight, bias, input,                                                                                       \
            decode::ResidualOutput<T>{                                                                                 \
                output, residual, residual_float != 0, {selected, tokens}, features, feature_stride},                  \
            batch, rows, columns, steps, stage != 0);                                                                  \
    }

// SECOND: of the second input, T or float.
#define DECODE_NORMS_LINEAR_KERNEL(NAME, T, SECOND, HELD)                                                              \
    extern "C" __global__ void __launch_bounds__(decode::THREADS, 1) decode_norms_linear_wide_##NAME(                  \
        const T* weight, const T* bias, const T* first, const T* first_norm, const SECOND* second,                     \
        const T* second_norm, float epsilon, float* output, int batch, int rows, int columns, int steps, T* kept) {    \
        const int width = columns / 2;                                                                                 \
        decode::norm_linear<T, 2, HELD, decode::Wide>(                                                                 \
            weight, bias,                                                                                              \
            decode::NormInputs<T, 2>{                                                                                  \
                {first, second}, {false, HELD != 0}, {first_norm, second_norm}, epsilon, width, kept, width, false},   \
            decode::FloatOutput{output}, batch, rows, columns, steps, false);                                          \
    }

}  // namespace decode

DECODE_LINEAR_KERNELS(float16, __half, , Narrow, NarrowPairs, Narrow, 2, 2)
DECODE_LINEAR_KERNELS(bfloat16, __nv_bfloat16, , Narrow, NarrowPairs, Narrow, 2, 2)
DECODE_LINEAR_KERNELS(float16, __half, _wide, Wide, WidePairs, WideTwice, 1, 8)
DECODE_LINEAR_KERNELS(bfloat16, __nv_bfloat16, _wide, Wide, WidePairs, WideTwice, 1, 8)
DECODE_NORMS_LINEAR_KERNEL(float16, __half, __half, 0)
DECODE_NORMS_LINEAR_KERNEL(bfloat16, __nv_bfloat16, __nv_bfloat16, 0)
DECODE_NORMS_LINEAR_KERNEL(float_float16, __half, float, 8)
DECODE_NORMS_LINEAR_KERNEL(float_bfloat16, __nv_bfloat16, float, 8)
