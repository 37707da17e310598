// Linear layers of decode, verify and draft steps: a few rows of activations times a weight matrix [N, K] that is
// streamed once from memory. What limits them is memory, so everything serves to keep loads in flight: each thread copies
// weights asynchronously into a ring of its own in shared memory, the first ones before the kernel waits for its
// predecessor, and a lane brings in the very activations that it multiplies.
//
// A block of 16 warps computes units of 8 or 16 weight rows (or of 8 gate and 8 up rows); the warps split K, each
// multiplies its slice on the tensor cores and the 16 partial sums are added in a fixed order. The order of every sum
// depends on K alone: a row gets the same bits in every batch, from the narrow kernels (up to 8 rows, two blocks on a
// multiprocessor) and from the wide ones (up to 16 rows, one block with a deeper ring, which reads the activations half
// as often).
#include "decode_common.cuh"

namespace decode {

constexpr int WARPS = 16;
constexpr int THREADS = 32 * WARPS;
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

// Of the thread's lane: the row of activations that it multiplies (and the one 8 further), and which 8 of 32 columns.
__device__ __forceinline__ int own_row() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int own_quad() { return threadIdx.x % 4; }
__device__ __forceinline__ int own_column(int steps) { return static_cast<int>(threadIdx.x / 32) * steps * 32 + own_quad() * 8; }

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

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

// Activations that were staged once for all units: `address` of the lane's own, one step `step_bytes` from the next.
struct Staged {
    unsigned address;
    int step_bytes;
    __device__ unsigned place(int, int step) const { return address + step * step_bytes; }
    __device__ void copy(int, int) const {}
};

// Activations that come with the weights, each time anew: of wide matrices they would not fit into shared memory.
template <typename T, int HALVES> struct Streamed {
    const T* row[HALVES];
    unsigned address;
    int stage_bytes, columns, column;
    bool exists[HALVES];
    __device__ unsigned place(int stage, int) const { return address + stage * stage_bytes; }
    __device__ void copy(int stage, int step) const {
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
            if (exists[half])
                copy_async_16(place(stage, step) + half * 512, row[half] + step * 32, column + step * 32 < columns);
    }
};

// One norm, or two of inputs that then stand side by side, each `width` columns wide.
template <typename T, int PARTS> struct NormInputs {
    const void* values[PARTS];  // [batch, width] float or T
    bool is_float[PARTS];
    const T* weight[PARTS];
    float epsilon;
    int width;
    T* kept;  // gets the last input's columns, where it is not null: normalized, or as they were
    int kept_stride;
    bool keeps_raw;

    __device__ bool in_last(int column) const { return PARTS == 2 && column >= width; }
    __device__ void load(int row, int column, float (&target)[8]) const {
        const int part = in_last(column) ? PARTS - 1 : 0;
        const size_t index = static_cast<size_t>(row) * width + column - part * width;
        if (part == 0 ? is_float[0] : is_float[PARTS - 1])
            load8_float(static_cast<const float*>(part == 0 ? values[0] : values[PARTS - 1]) + index, target);
        else
            unpack8<T>(__ldcg(reinterpret_cast<const uint4*>(
                           static_cast<const T*>(part == 0 ? values[0] : values[PARTS - 1]) + index)),
                       target);
    }
    __device__ void keep(int row, int column, const float (&raw)[8], uint4 normalized) const {
        if (PARTS == 2 && column < width) return;
        T* target = kept + static_cast<size_t>(row) * kept_stride + column - (PARTS - 1) * width;
        *reinterpret_cast<uint4*>(target) = keeps_raw ? pack8<T>(raw) : normalized;
    }
    // The norms' weights to shared memory, by the whole block, as part of the thread's next group of copies.
    __device__ void copy_weights(T* shared, int columns) const {
        for (int column = threadIdx.x * 8; column < columns; column += THREADS * 8) {
            const bool last = in_last(column);
            copy_async_16(shared_address(shared + column),
                          last ? weight[PARTS - 1] + column - width : weight[0] + column, true);
        }
    }
};

// Each lane puts the activations that it multiplies, normalized, into `activations`; all warps call it. `sums` [PARTS,
// rows, WARPS]; `weights` [columns] holds the norms' weights when the thread's oldest group of copies has come.
template <typename T, int PARTS, typename G>
__device__ __forceinline__ void stage_normalized(
    const NormInputs<T, PARTS>& inputs, const T* weights, float* sums, const Staged& staged, char* activations,
    int batch, int columns, int steps) {
    constexpr int HELD = 4;  // steps whose activations stay in registers; of more they are read twice
    const int warp = threadIdx.x / 32, first = own_column(steps);
    float values[G::HALVES][HELD][8];
    auto load = [&](int base) {
#pragma unroll
        for (int half = 0; half < G::HALVES; ++half)
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                const int row = own_row() + 8 * half, column = first + (base + i) * 32;
#pragma unroll
                for (int j = 0; j < 8; ++j) values[half][i][j] = 0.f;
                if (row < batch && base + i < steps && column < columns) inputs.load(row, column, values[half][i]);
            }
    };
    float squares[G::HALVES][PARTS] = {};
    for (int base = 0; base < steps; base += HELD) {
        load(base);
#pragma unroll
        for (int half = 0; half < G::HALVES; ++half)
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                float sum = 0.f;
#pragma unroll
                for (int j = 0; j < 8; ++j) sum = fmaf(values[half][i][j], values[half][i][j], sum);
                if (inputs.in_last(first + (base + i) * 32))
                    squares[half][PARTS - 1] += sum;
                else
                    squares[half][0] += sum;
            }
    }
#pragma unroll
    for (int half = 0; half < G::HALVES; ++half)
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            float sum = squares[half][part];
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            if (own_quad() == 0) sums[((part * G::HALVES + half) * 8 + own_row()) * WARPS + warp] = sum;
        }
    wait_for_copies<G::STAGES - 1>();
    __syncthreads();
    float scale[G::HALVES][PARTS];
#pragma unroll
    for (int half = 0; half < G::HALVES; ++half)
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            float total = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) total += sums[((part * G::HALVES + half) * 8 + own_row()) * WARPS + w];
            scale[half][part] = rsqrtf(total / inputs.width + inputs.epsilon);
        }
    for (int base = 0; base < steps; base += HELD) {
        if (steps > HELD) load(base);
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int step = base + i, column = first + step * 32;
            if (step >= steps) continue;
            float factors[8] = {};
            if (column < columns) unpack8<T>(*reinterpret_cast<const uint4*>(weights + column), factors);
#pragma unroll
            for (int half = 0; half < G::HALVES; ++half) {
                const int row = own_row() + 8 * half;
                if (row >= batch) continue;
                const float factor = inputs.in_last(column) ? scale[half][PARTS - 1] : scale[half][0];
                float normalized[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) normalized[j] = values[half][i][j] * factor * factors[j];
                const uint4 packed = pack8<T>(normalized);
                *reinterpret_cast<uint4*>(activations + staged.place(0, step) - staged.address + half * 512) = packed;
                if (blockIdx.x == 0 && inputs.kept != nullptr && column < columns)
                    inputs.keep(row, column, values[half][i], packed);
            }
        }
    }
}

// What becomes of the sums of one row b of activations and one column n of N (gate and up).
struct FloatOutput {
    float* output;
    __device__ void operator()(int b, int n, int rows, const float (&sum)[1]) const {
        output[static_cast<size_t>(b) * rows + n] = sum[0];
    }
};

// Row b of activations and residual: `selected[b]` of each `tokens`, where that is not null.
struct SelectedRows {
    const int* selected;
    int tokens;
    __device__ int operator()(int b) const {
        return selected == nullptr ? b : b * tokens + min(max(__ldcg(selected + b), 0), tokens - 1);
    }
};

// The residual (null: zero) that is added also goes to `features`, where that is not null, its rows `feature_stride` apart.
template <typename T> struct ResidualOutput {
    float* output;
    const void* residual;
    bool residual_float;
    SelectedRows source;
    T* features;
    int feature_stride;
    __device__ void operator()(int b, int n, int rows, const float (&sum)[1]) const {
        float before = 0.f;
        if (residual != nullptr) {
            const size_t index = static_cast<size_t>(source(b)) * rows + n;
            before = residual_float ? __ldcg(static_cast<const float*>(residual) + index)
                                    : to_float(__ldcg(static_cast<const T*>(residual) + index));
        }
        if (features != nullptr) features[static_cast<size_t>(b) * feature_stride + n] = from_float<T>(before);
        output[static_cast<size_t>(b) * rows + n] = before + sum[0];
    }
};

template <typename T> struct SiluOutput {
    T* output;
    __device__ void operator()(int b, int n, int rows, const float (&sum)[2]) const {
        output[static_cast<size_t>(b) * rows + n] = from_float<T>(sum[0] / (1.f + expf(-sum[0])) * sum[1]);
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
            for (int each = 0; each < WARPS; ++each)
#pragma unroll
                for (int s = 0; s < G::SUMS; ++s)
                    total[s] += theirs[each * G::PARTIALS + (G::PAIRED ? s : place / 8) * G::HALVES * 64];
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
// once, or only when the previous one has finished.
template <typename T, int PARTS, typename G, typename Output>
__device__ __forceinline__ void norm_linear(
    const T* weight, const T* bias, const NormInputs<T, PARTS>& inputs, const Output& output, int batch, int rows,
    int columns, int steps, bool next_early) {
    extern __shared__ __align__(16) char shared[];
    char* ring = shared;                                                                 // [DEPTH, THREADS] of 16 bytes
    float* partial = reinterpret_cast<float*>(ring + G::STAGES * G::TILES * THREADS * 16);  // [2, WARPS, PARTIALS]
    float* sums = partial + 2 * WARPS * G::PARTIALS;                                     // [PARTS, rows, WARPS]
    T* norm_weights = reinterpret_cast<T*>(sums + PARTS * G::HALVES * 8 * WARPS);        // [WARPS, steps, 32]
    char* activations = reinterpret_cast<char*>(norm_weights + WARPS * steps * 32);      // [WARPS, steps, batch, 64 bytes]

    if (next_early) launch_next_kernel();
    inputs.copy_weights(norm_weights, columns);
    Weights<T, G> weights = start_weights<T, G>(weight, ring, rows, columns, steps);
    char* own = activations + (threadIdx.x / 32 * steps * batch + own_row()) * 64 + own_quad() * 16;
    const Staged staged = {shared_address(own), batch * 64};
    wait_for_previous_kernel();
    if (!next_early) launch_next_kernel();
    stage_normalized<T, PARTS, G>(inputs, norm_weights, sums, staged, own, batch, columns, steps);
    multiply_units<T, G>(weights, staged, bias, output, partial, batch);
}

// Linear of what is multiplied as it is. next_early: see above.
template <typename T, typename G>
__device__ __forceinline__ void linear_residual(
    const T* weight, const T* bias, const T* input, const ResidualOutput<T>& output, int batch, int rows, int columns,
    int steps, bool next_early) {
    extern __shared__ __align__(16) char shared[];
    char* ring = shared;                                                                 // [DEPTH, THREADS] of 16 bytes
    float* partial = reinterpret_cast<float*>(ring + G::STAGES * G::TILES * THREADS * 16);  // [2, WARPS, PARTIALS]
    char* activation_ring = reinterpret_cast<char*>(partial + 2 * WARPS * G::PARTIALS);  // [STAGES, WARPS, batch, 64 bytes]

    if (next_early) launch_next_kernel();
    Weights<T, G> weights = start_weights<T, G>(weight, ring, rows, columns, steps);
    wait_for_previous_kernel();
    if (!next_early) launch_next_kernel();
    Streamed<T, G::HALVES> activations;
    activations.address =
        shared_address(activation_ring + (threadIdx.x / 32 * batch + own_row()) * 64 + own_quad() * 16);
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

#define DECODE_LINEAR_KERNELS(NAME, T, WIDTH, GEOMETRY, PAIRS, RESIDUAL, BLOCKS)                                       \
    extern "C" __global__ void __launch_bounds__(decode::THREADS, BLOCKS) decode_norm_linear##WIDTH##_##NAME(          \
        const T* weight, const T* bias, const void* input, int input_float, const T* norm_weight, float epsilon,       \
        float* output, int batch, int rows, int columns, int steps, int next_early, T* kept, int kept_stride,          \
        int keeps_raw) {                                                                                               \
        decode::norm_linear<T, 1, decode::GEOMETRY>(                                                                   \
            weight, bias,                                                                                              \
            decode::NormInputs<T, 1>{                                                                                  \
                {input}, {input_float != 0}, {norm_weight}, epsilon, columns, kept, kept_stride, keeps_raw != 0},      \
            decode::FloatOutput{output}, batch, rows, columns, steps, next_early != 0);                                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(decode::THREADS, BLOCKS) decode_norm_gate_up##WIDTH##_##NAME(         \
        const T* weight, const T* bias, const void* input, int input_float, const T* norm_weight, float epsilon,       \
        T* output, int batch, int rows, int columns, int steps) {                                                      \
        decode::norm_linear<T, 1, decode::PAIRS>(                                                                      \
            weight, bias,                                                                                              \
            decode::NormInputs<T, 1>{{input}, {input_float != 0}, {norm_weight}, epsilon, columns, nullptr, 0, false}, \
            decode::SiluOutput<T>{output}, batch, rows, columns, steps, true);                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(decode::THREADS, BLOCKS) decode_linear_residual##WIDTH##_##NAME(      \
        const T* weight, const T* bias, const T* input, const void* residual, int residual_float, float* output,       \
        int batch, int rows, int columns, int steps, const int* selected, int tokens, T* features,                     \
        int feature_stride) {                                                                                          \
        decode::linear_residual<T, decode::RESIDUAL>(                                                                  \
            weight, bias, input,                                                                                       \
            decode::ResidualOutput<T>{                                                                                 \
                output, residual, residual_float != 0, {selected, tokens}, features, feature_stride},                  \
            batch, rows, columns, steps, true);                                                                        \
    }

#define DECODE_NORMS_LINEAR_KERNEL(NAME, T)                                                                            \
    extern "C" __global__ void __launch_bounds__(decode::THREADS, 1) decode_norms_linear_wide_##NAME(                  \
        const T* weight, const T* bias, const T* first, const T* first_norm, const void* second, int second_float,     \
        const T* second_norm, float epsilon, float* output, int batch, int rows, int columns, int steps, T* kept) {    \
        const int width = columns / 2;                                                                                 \
        decode::norm_linear<T, 2, decode::Wide>(                                                                       \
            weight, bias,                                                                                              \
            decode::NormInputs<T, 2>{{first, second}, {false, second_float != 0}, {first_norm, second_norm}, epsilon,  \
                                     width, kept, width, false},                                                       \
            decode::FloatOutput{output}, batch, rows, columns, steps, false);                                          \
    }

}  // namespace decode

DECODE_LINEAR_KERNELS(float16, __half, , Narrow, NarrowPairs, Narrow, 2)
DECODE_LINEAR_KERNELS(bfloat16, __nv_bfloat16, , Narrow, NarrowPairs, Narrow, 2)
DECODE_LINEAR_KERNELS(float16, __half, _wide, Wide, WidePairs, WideTwice, 1)
DECODE_LINEAR_KERNELS(bfloat16, __nv_bfloat16, _wide, Wide, WidePairs, WideTwice, 1)
DECODE_NORMS_LINEAR_KERNEL(float16, __half)
DECODE_NORMS_LINEAR_KERNEL(bfloat16, __nv_bfloat16)
