// Linear layers of decode, verify and draft steps: a few rows of activations times a weight matrix [N, K] that is
// streamed once from memory. What limits them is memory, so everything serves to keep loads in flight: each thread copies
// weights asynchronously into a ring of its own in shared memory, the first ones before the kernel waits for its predecessor.
//
// A block of 16 warps computes units of 8 or 16 weight rows (or of 8 gate and 8 up rows); the warps split K, each
// multiplies its slice on the tensor cores, and the 16 partial sums are added in a fixed order, in groups of four. The
// order of every sum depends on K alone: a row gets the same bits in every batch, from the narrow kernels (up to 8 rows,
// two blocks on a multiprocessor), from the wide ones (up to 16 rows, one block with a deeper ring, which reads the
// activations half as often) and from those of tiled_linear.cu.
#pragma once
#include "decode/few_rows.cuh"
#include "decode/linear_weights.cuh"

namespace decode {

// PAIRED: a unit's tiles are gate and up rows, which lie `rows` apart; else they follow each other. DEPTH: 16-byte copies of
// weights that a thread has in flight. HALVES of 16 rows of activations: the kernels are narrow (two blocks on a
// multiprocessor; also with a deep ring, for long rows) or wide.
template <int TILES_, bool PAIRED_, int HALVES_, int DEPTH> struct Geometry {
    static constexpr int TILES = TILES_, HALVES = HALVES_;
    static constexpr bool PAIRED = PAIRED_;
    static constexpr int STAGES = DEPTH / TILES;
    static constexpr unsigned TURN = TILES * THREADS * 16, TURNS = STAGES * TURN;  // bytes of a stage, and of the ring
    static constexpr int UNIT = PAIRED ? TILE_ROWS : TILES * TILE_ROWS;  // output columns of a unit
    static constexpr int SUMS = PAIRED ? TILES : 1;                      // that an output is made of
    static constexpr int PARTIALS = TILES * HALVES * 64;                 // floats that a warp leaves of a unit
    static constexpr int BLOCKS = HALVES == 1 ? 2 : 1;                   // on a multiprocessor
    static constexpr int HELD = HALVES == 1 ? 1 : 8;                     // see stage_normalized

    // Shared memory: the ring [DEPTH, THREADS] of 16 bytes, partial sums [2, WARPS, PARTIALS]; then sums of norms
    // [parts, rows, SUM_STRIDE], the norms' weights [WARPS, steps, 32] and activations [WARPS, steps, batch, 64 bytes];
    // or activations as they are, staged or [STAGES, WARPS, batch, 64 bytes]. At the end,
    // twice, what adapters add [places, PARTIALS], then their rows of B [warps of all places, rank, 16 bytes].
    static constexpr int PARTIAL = TURNS, SUMS_BEGIN = PARTIAL + 2 * WARPS * PARTIALS * 4;
    static __device__ constexpr int weights_begin(int parts) { return SUMS_BEGIN + parts * HALVES * 8 * SUM_STRIDE * 4; }
    static __device__ constexpr int norm_bytes(int parts, int batch, int steps) {
        return weights_begin(parts) + WARPS * steps * 64 * (1 + batch);
    }
    static __device__ constexpr int staged_bytes(int batch, int steps) { return SUMS_BEGIN + WARPS * steps * batch * 64; }
    static __device__ constexpr int streamed_bytes(int batch) { return SUMS_BEGIN + STAGES * WARPS * batch * 64; }
};

using Narrow = Geometry<1, false, 1, HOST_NARROW_DEPTH>;
using Deep = Geometry<1, false, 1, HOST_DEEP_DEPTH>;
using NarrowPairs = Geometry<2, true, 1, HOST_NARROW_DEPTH>;
using Wide = Geometry<1, false, 2, HOST_WIDE_DEPTH>;
using WidePairs = Geometry<2, true, 2, HOST_WIDE_DEPTH>;
using WideTwice = Geometry<2, false, 2, HOST_WIDE_DEPTH>;
static_assert(Narrow::norm_bytes(1, 2, 3) == HOST_NARROW_BYTES && NarrowPairs::norm_bytes(1, 2, 3) == HOST_NARROW_PAIRS_BYTES,
              "the host gives narrow kernels their shared memory");
static_assert(Wide::norm_bytes(2, 9, 3) == HOST_WIDE_BYTES && WidePairs::norm_bytes(1, 9, 3) == HOST_WIDE_PAIRS_BYTES,
              "the host gives wide kernels their shared memory");
static_assert(Narrow::staged_bytes(2, 3) == HOST_STAGED_BYTES && WideTwice::streamed_bytes(9) == HOST_STREAMED_BYTES,
              "the host gives linear_residual its shared memory");

// The warp's sums of a unit, over its slice of K. Every group of copies holds one step of weights and, where they are
// streamed, activations. place: the thread's in the ring, of the next step.
template <typename T, typename G, bool ADAPTED, typename Activations>
__device__ __forceinline__ void multiply_unit(
    float (&sum)[G::TILES][4], Weights<T, G, ADAPTED>& weights, const Activations& activations, unsigned& place,
    int batch) {
    const int steps = weights.steps;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        wait_for_copies<G::STAGES - 1>();
        unsigned x[2] = {}, y[2] = {}, z[2] = {}, w[2] = {};
#pragma unroll
        for (int half = 0; half < G::HALVES; ++half)
            if (own_row() + 8 * half < batch) {
                const uint4 a = read_shared_16(activations.place((place - weights.ring) / G::TURN, step) + half * 512);
                x[half] = a.x, y[half] = a.y, z[half] = a.z, w[half] = a.w;
            }
#pragma unroll
        for (int tile = 0; tile < G::TILES; ++tile) {
            const uint4 b = read_shared_16(place + tile * THREADS * 16);
            multiply_add(sum[tile], x, y, b.x, b.y, T());
            multiply_add(sum[tile], z, w, b.z, b.w, T());
        }
        if (weights.has_more()) {
            weights.copy(place);
            activations.copy((place - weights.ring) / G::TURN, weights.step);
            weights.advance();
        }
        commit_copies();
        place = weights.after(place);
    }
}

// The sums of an output, of what the warps left of it at `theirs`.
template <typename G> __device__ __forceinline__ void add_slices(float (&total)[G::SUMS], const float* theirs) {
#pragma unroll
    for (int s = 0; s < G::SUMS; ++s) total[s] = 0.f;
#pragma unroll
    for (int first = 0; first < WARPS; first += SLICES_OF_A_GROUP)
#pragma unroll
        for (int s = 0; s < G::SUMS; ++s) {
            float group = 0.f;
#pragma unroll
            for (int i = first; i < first + SLICES_OF_A_GROUP; ++i) group += theirs[i * G::PARTIALS + s * G::HALVES * 64];
            total[s] += group;
        }
}

// What a thread writes of a unit: the sums of one output, and what that needs beside them.
template <typename G> struct Result {
    float total[G::SUMS], biases[G::SUMS], before;
};

// All units of the block. With adapters a unit's result waits until the next one has been multiplied: what A made of the
// activations comes from other blocks.
template <typename T, typename G, bool ADAPTED, typename Activations, typename Output>
__device__ __forceinline__ void multiply_units(
    Weights<T, G, ADAPTED>& weights, const Activations& activations, const T* bias, const Output& output,
    float* partial, int batch) {
    const int warp = threadIdx.x / 32, rows = weights.rows, steps = weights.steps;
    const int column = threadIdx.x % G::UNIT, b = threadIdx.x / G::UNIT;  // of the output that the thread writes
    const int own = b * 8 + column % 8 + (G::PAIRED ? 0 : column / 8) * G::HALVES * 64;
    const auto writes = [&](int unit) { return unit >= 0 && b < batch && unit + column < rows; };
    Result<G> result = {};
    const auto prepare = [&](int unit) {  // reads what is needed beside sums
        if (!writes(unit)) return;
        result.before = output.before(b, unit + column, rows);
#pragma unroll
        for (int s = 0; s < G::SUMS; ++s)
            if (bias != nullptr) result.biases[s] = to_float(bias[s * rows + unit + column]);
    };
    const auto write = [&](int unit) {
        if (bias != nullptr)
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s) result.total[s] += result.biases[s];
        output(b, unit + column, rows, result.total, result.before);
    };
    int buffer = 0;
    unsigned place = weights.ring;
    for (int unit = weights.first_unit();; unit = weights.unit_after(unit)) {
        const bool is_last = unit >= rows;
        if (is_last && !ADAPTED) break;
        const int held = unit - gridDim.x * G::UNIT;  // the unit whose result waits; below 0 for none
        if (!is_last) {
            if constexpr (!ADAPTED) prepare(unit);
            else if (held >= 0) weights.copy_b(buffer, unit);  // those of the first one come already
            float sum[G::TILES][4] = {};
            multiply_unit(sum, weights, activations, place, batch);
#pragma unroll
            for (int tile = 0; tile < G::TILES; ++tile)
                leave_sums<G>(partial + (buffer * WARPS + warp) * G::PARTIALS, tile, sum[tile], batch);
        }
        if constexpr (ADAPTED)
            if (held >= 0 && weights.adapters.has_share) {
                // Rows of B came with the unit's first step, 2 * `steps` groups before the last.
                if (is_last || 2 * steps < G::STAGES) wait_for_copies<0>();
                else if (2 * steps == G::STAGES) wait_for_copies<G::STAGES - 1>();
                __syncwarp();
                weights.adapters.add_share(buffer ^ 1, weights.tile_column(held, weights.adapters.tile()));
            }
        __syncthreads();
        if constexpr (ADAPTED) {
            if (writes(held)) {
#pragma unroll
                for (int s = 0; s < G::SUMS; ++s)
                    result.total[s] += weights.adapters.of_all(buffer ^ 1, own + s * G::HALVES * 64);
                write(held);
            }
            if (is_last) break;
            prepare(unit);
        }
        if (ADAPTED ? warp * 32 < batch * G::UNIT : writes(unit)) {
            add_slices<G>(result.total, partial + buffer * WARPS * G::PARTIALS + own);
            if constexpr (!ADAPTED) write(unit);
            else if (unit < 0) weights.adapters.leave_products(unit, b, column, result.total);
        }
        if (ADAPTED && unit < 0) __syncthreads();
        else buffer ^= 1;  // the next unit's partial sums; this buffer's turn comes after another barrier
    }
    wait_for_copies<0>();
}

// Linear of what is normalized or, not NORMED, rounded. HELD 0: inputs of T alone, normalized in shared memory.
template <typename T, int PARTS, int HELD, typename G, bool ADAPTED, bool NORMED = true, typename Inputs, typename Output>
__device__ __forceinline__ void multiply_normalized(
    const Inputs& inputs, const NormLinear& arguments, const Output& output) {
    extern __shared__ __align__(16) char shared[];
    const Linear& linear = arguments.linear;
    const bool next_early = arguments.next_early != 0, beside = !ADAPTED && arguments.beside != 0;
    const int batch = linear.batch, columns = linear.columns, steps = linear.steps;
    float* partial = reinterpret_cast<float*>(shared + G::PARTIAL);
    float* sums = reinterpret_cast<float*>(shared + G::SUMS_BEGIN);
    T* norm_weights = reinterpret_cast<T*>(shared + G::weights_begin(PARTS));
    char* activations = reinterpret_cast<char*>(norm_weights + WARPS * steps * 32);

    if (next_early) launch_next_kernel();
    if constexpr (NORMED) inputs.copy_weights(norm_weights, columns);
    Weights<T, G, ADAPTED> weights(linear, shared);
    weights.begin(shared + G::norm_bytes(PARTS, batch, steps));
    inputs.prefetch();
    if (!beside) wait_for_previous_kernel();
    if (!next_early) launch_next_kernel();
    weights.adapters.clear_next();
    if constexpr (!NORMED)
        stage_rounded<T>(inputs, activations, batch, columns, steps);
    else if constexpr (HELD == 0)
        stage_normalized_in_place<T, G>(inputs, norm_weights, sums, activations, batch, columns, steps);
    else
        stage_normalized<T, PARTS, HELD, G>(inputs, norm_weights, sums, activations, batch, columns, steps);
    multiply_units(
        weights, staged_for_lane(activations, batch, steps), static_cast<const T*>(linear.bias), output, partial,
        batch);
    if (beside) wait_for_previous_kernel();
}

}  // namespace decode
