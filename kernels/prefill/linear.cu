// Linear layers of any number of rows of activations, as prompts have: tiles of weight rows times rows of activations.
//
// Every sum has the order of decode/linear.cu: slices of K from zero, four slices a group, then the groups. So a row gets
// the bits of the decode step. A warp has its own rows of activations and weight rows, for all of K; it keeps the sums
// of the slice and of the group in registers, and those of all groups there or, of large tiles, in shared memory. Blocks
// stay: each walks over its tiles, and the next tile's first columns are copied while the last one's outputs are written.
#include "decode/many_rows.cuh"
#include "prefill/linear_adapters.cuh"
#include "prefill/linear_tiles.cuh"

namespace prefill {

// A thread's sums over the columns of a tile.
template <typename T, typename G> struct TileSums {
    Sums<G> slice, group, total;  // a total in shared memory is `place`, and in registers only at the end
    float4* place;
    int steps, steps_left, slices_left;
    bool has_total;

    __device__ TileSums(float4* own, int steps_of_slice) : place(own), steps(steps_of_slice) {}
    __device__ void begin() {
        steps_left = 0, slices_left = SLICES_OF_A_GROUP + 1, has_total = false;
        for_each_sum<G>([&](int r, int c, int i) {
            slice[r][c][i] = group[r][c][i] = 0.f;
            if (!G::SHARED_TOTAL) total[r][c][i] = 0.f;
        });
    }
    // Multiplies the step that lies at `step`, and reads what the next one begins with, which lies where `next` says.
    // A step that begins a slice first adds the one before to the group, each sum where its first product is made, so
    // that additions stand between products.
    template <typename Next>
    __device__ void multiply(Fragments<G>& fragments, const char* step, const Lane<G>& lane, const Next& next) {
        if (steps_left == 0) {
            multiply_step<true>(fragments, step, lane, next);
            steps_left = steps;
            if (--slices_left == 0) {
                slices_left = SLICES_OF_A_GROUP;
                end_group();
            }
        } else {
            multiply_step<false>(fragments, step, lane, next);
        }
        --steps_left;
    }
    // Leaves all of it in `total`.
    __device__ void end() {
        for_each_sum<G>([&](int r, int c, int i) { group[r][c][i] += slice[r][c][i]; });
        if constexpr (G::SHARED_TOTAL) {
            const bool adds = has_total;
            for_each_place([&](int r, int c, float4& own) {
                const float4 before = adds ? own : make_float4(0.f, 0.f, 0.f, 0.f);
                total[r][c][0] = before.x, total[r][c][1] = before.y;
                total[r][c][2] = before.z, total[r][c][3] = before.w;
            });
        }
        for_each_sum<G>([&](int r, int c, int i) { total[r][c][i] += group[r][c][i]; });
    }

  private:
    template <bool BEGINS, typename Next>
    __device__ void multiply_step(Fragments<G>& fragments, const char* step, const Lane<G>& lane, const Next& next) {
        using F = Fragments<G>;
        fragments.begin();
#pragma unroll
        for (int part = 0; part < F::PARTS; ++part) {
            if (part + 1 < F::PARTS) fragments.read_weights(step, lane, part + 1);
            else fragments.read_first(next(), lane);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
                    for (int i = 0; i < F::TILES; ++i) {
                        const int c = part * F::TILES + i;
                        float(&sum)[4] = slice[r][c];
                        if (BEGINS && half == 0) {
#pragma unroll
                            for (int k = 0; k < 4; ++k) group[r][c][k] += sum[k], sum[k] = 0.f;
                        }
                        fragments.multiply(sum, r, part, i, half, T());
                    }
        }
    }
    template <typename Action> __device__ void for_each_place(const Action& action) {
#pragma unroll
        for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
            for (int c = 0; c < G::COLUMN_TILES; ++c) action(r, c, place[(r * G::COLUMN_TILES + c) * G::THREADS]);
    }
    __device__ void end_group() {
        if constexpr (G::SHARED_TOTAL) {
            const bool adds = has_total;
            for_each_place([&](int r, int c, float4& own) {
                float(&sum)[4] = group[r][c];
                const float4 before = adds ? own : make_float4(0.f, 0.f, 0.f, 0.f);
                own = make_float4(before.x + sum[0], before.y + sum[1], before.z + sum[2], before.w + sum[3]);
                sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
            });
            has_total = true;
        } else {
            for_each_sum<G>([&](int r, int c, int i) { total[r][c][i] += group[r][c][i], group[r][c][i] = 0.f; });
        }
    }
};

// What becomes of a thread's sums. rows: the layer's outputs, of gates and ups half of its weight rows.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void write(
    const Sums<G>& total, const Lane<G>& lane, const T* bias, const Output& output, const Place& place, int batch,
    int rows) {
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int b = place.row + lane.row_of(r, half);
            if (b >= batch) continue;
            float2 before[G::COLUMN_TILES];
#pragma unroll
            for (int c = 0; c < G::COLUMN_TILES; c += G::SUMS) {
                const int n = place.column + lane.weight_row_of(c);
                if (n < rows) before[c] = output.before_two(b, n, rows);
            }
#pragma unroll
            for (int c = 0; c < G::COLUMN_TILES; c += G::SUMS) {
                const int n = place.column + lane.weight_row_of(c);
                if (n >= rows) continue;
                float2 one[G::SUMS];
#pragma unroll
                for (int s = 0; s < G::SUMS; ++s) {
                    one[s] = make_float2(total[r][c + s][2 * half], total[r][c + s][2 * half + 1]);
                    if (bias != nullptr) {
                        const float2 more = read_two(bias + s * rows + n, n, rows);
                        one[s].x += more.x, one[s].y += more.y;
                    }
                }
                output.two(b, n, rows, one, before[c]);
            }
        }
}

// The products of LoRA adapters' A as an output of their own: columns n, which is even, and n + 1 of all places.
template <typename T> struct LowOutput {
    RowAdapters<T> adapters;
    __device__ float2 before_two(int, int, int) const { return make_float2(0.f, 0.f); }
    __device__ void two(int b, int n, int, const float2 (&sum)[1], float2) const { adapters.leave(b, n, sum[0]); }
};

// Grid: as many blocks as run at once. Dynamic shared memory: the ring of stages, then totals.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void multiply(
    const TiledLinear& arguments, const T* weight, int rows, const T* bias, const Output& output) {
    extern __shared__ __align__(128) char shared[];
    const Linear& linear = arguments.linear;
    const Operands<T> operands{weight, static_cast<const T*>(arguments.input), arguments.stride, linear.batch, rows,
                               linear.columns, {arguments.selected, arguments.tokens}};
    launch_next_kernel();
    wait_for_previous_kernel();
    const Work work(G::ROWS, G::UNIT, linear.batch, rows, (linear.columns + STAGE_COLUMNS - 1) / STAGE_COLUMNS);
    Copies<T, G> chunks(operands, work, shared, arguments.stages);
    const Lane<G> lane;
    TileSums<T, G> sums(
        reinterpret_cast<float4*>(shared + arguments.stages * G::STAGE_BYTES) + threadIdx.x, linear.steps);
    for (int tile = blockIdx.x; tile < work.tiles; tile += gridDim.x) {
        sums.begin();
        Fragments<G> fragments;
        fragments.read_first(chunks.next_stage(), lane);
#pragma unroll 1
        for (int chunk = 1; chunk <= work.chunks; ++chunk) {
            chunks.copy();
            const char *first = chunks.stage(), *second = first + G::STEP_BYTES;
            sums.multiply(fragments, first, lane, [&] { return second; });
            // Behind the last chunk something is read that nobody multiplies.
            sums.multiply(fragments, second, lane, [&] { return chunk < work.chunks ? chunks.next_stage() : first; });
        }
        sums.end();
        const Place place = work.place_of(tile);
        if constexpr (G::ADAPTED) add_adapters<T, G>(sums.total, lane, linear, place);
        write<T, G>(sums.total, lane, bias, output, place, linear.batch, rows);
    }
}

#define PROMPT_KERNEL(NAME)                                                                                            \
    template <typename T, int ROW_TILES, int COLUMN_TILES, int ROW_WARPS, int COLUMN_WARPS, int BLOCKS,                \
              bool SHARED_TOTAL, bool ADAPTED>                                                                         \
    __global__ void __launch_bounds__(32 * ROW_WARPS * COLUMN_WARPS, BLOCKS) NAME(                                     \
        const __grid_constant__ TiledLinear arguments)
#define PROMPT_GEOMETRY(PAIRED)                                                                                        \
    using G = Geometry<ROW_TILES, COLUMN_TILES, ROW_WARPS, COLUMN_WARPS, SHARED_TOTAL, PAIRED, ADAPTED>;               \
    const Linear& linear = arguments.linear;                                                                           \
    const T *weight = static_cast<const T*>(linear.weight), *bias = static_cast<const T*>(linear.bias)

// output = scale (input weight^T + bias)
PROMPT_KERNEL(linear) {
    PROMPT_GEOMETRY(false);
    const FloatOutput output{static_cast<float*>(arguments.output), linear.scale};
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
    multiply<T, G>(arguments, static_cast<const T*>(linear.adapters.a), adapters.all_low_rows(),
                   static_cast<const T*>(nullptr), LowOutput<T>{adapters});
    adapters.clear_next();
}
#undef PROMPT_KERNEL
#undef PROMPT_GEOMETRY

}  // namespace prefill
