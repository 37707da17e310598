// Linear layers of any number of rows of activations, as prompts have: tiles of weight rows times rows of activations.
//
// Every sum has the order of decode/linear.cu: slices of K from zero, four slices a group, then the groups. So a row
// gets the bits of the decode step. A warp has its own rows of activations and weight rows, for all of K; it keeps the
// sums of the slice and of the group in registers, and those of all groups there or, of large tiles, in shared memory.
// Blocks stay: each walks over its tiles, and the next tile's first columns are copied while the last one's outputs are
// written. Where there are fewer tiles than multiprocessors, each group has warps of its own.
#include "decode/many_rows.cuh"
#include "prefill/linear_adapters.cuh"
#include "prefill/linear_packed.cuh"
#include "shared/plain_activations.cuh"

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
            if (G::TOTALS == REGISTERS) total[r][c][i] = 0.f;
        });
    }
    // Multiplies the step number STEP of a stage, and reads what the next one begins with; see the fragments.
    template <int STEP, typename Its, typename Next>
    __device__ void multiply(Its& fragments, const char* place, const Lane<G>& lane, const Next& next) {
        fragments.begin();
        if (steps_left != 0) {
            fragments.template multiply<NOTHING, STEP>(*this, place, lane, next);
        } else {
            steps_left = steps;
            if (--slices_left != 0) {
                fragments.template multiply<SLICE, STEP>(*this, place, lane, next);
            } else {
                slices_left = SLICES_OF_A_GROUP;
                fragments.template multiply<GROUP, STEP>(*this, place, lane, next);
                has_total = true;
            }
        }
        --steps_left;
    }
    // Each sum is added where its next product is made, so that additions stand between products.
    template <int BEGINS> __device__ void begin(int r, int c) {
        if (BEGINS != NOTHING) end_slice(r, c);
        if (BEGINS == GROUP) end_group(r, c);
    }
    // Leaves all of it in `total`.
    __device__ void end() {
        for_each_sum<G>([&](int r, int c, int i) { group[r][c][i] += slice[r][c][i]; });
        if constexpr (G::TOTALS == SHARED) {
            const bool adds = has_total;
            for_each_place([&](int r, int c, float4& own) {
                const float4 before = adds ? own : make_float4(0.f, 0.f, 0.f, 0.f);
                total[r][c][0] = before.x, total[r][c][1] = before.y;
                total[r][c][2] = before.z, total[r][c][3] = before.w;
            });
        }
        for_each_sum<G>([&](int r, int c, int i) { total[r][c][i] += group[r][c][i]; });
    }
    // Of a team's group alone: leaves the group's sums in shared memory, and in `joined` those of all groups, of a
    // fourth of the thread's tiles: one row tile, of two that there are half of the column tiles.
    template <typename Part> __device__ void join(Sums<Part>& joined, char* shared) {
        constexpr int TILES = G::ROW_TILES * G::COLUMN_TILES;
        static_assert(Part::COLUMN_TILES * G::TEAMS == TILES, "each team joins a fourth of the sums");
        float4* area = reinterpret_cast<float4*>(shared) + threadIdx.x % G::TEAM;
        const int team = threadIdx.x / G::TEAM;
        wait_for_copies<0>();
        __syncthreads();  // the ring, whose memory takes the sums, has been read by all
#pragma unroll
        for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
            for (int c = 0; c < G::COLUMN_TILES; ++c) {
                const float(&last)[4] = slice[r][c], (&own)[4] = group[r][c];
                area[(team * TILES + r * G::COLUMN_TILES + c) * G::TEAM] =
                    make_float4(own[0] + last[0], own[1] + last[1], own[2] + last[2], own[3] + last[3]);
            }
        __syncthreads();
        const int first = team * Part::COLUMN_TILES;
#pragma unroll
        for (int c = 0; c < Part::COLUMN_TILES; ++c) {
            float(&sum)[4] = joined[0][c];
            sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
#pragma unroll
            for (int g = 0; g < G::TEAMS; ++g) {
                const float4 more = area[(g * TILES + first + c) * G::TEAM];
                sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
            }
        }
    }

  private:
    template <typename Action> __device__ void for_each_place(const Action& action) {
#pragma unroll
        for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
            for (int c = 0; c < G::COLUMN_TILES; ++c) action(r, c, place[(r * G::COLUMN_TILES + c) * G::THREADS]);
    }
    __device__ void end_slice(int r, int c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) group[r][c][i] += slice[r][c][i], slice[r][c][i] = 0.f;
    }
    __device__ void end_group(int r, int c) {
        float(&sum)[4] = group[r][c];
        if constexpr (G::TOTALS == SHARED) {
            float4& own = place[(r * G::COLUMN_TILES + c) * G::THREADS];
            const float4 before = has_total ? own : make_float4(0.f, 0.f, 0.f, 0.f);
            own = make_float4(before.x + sum[0], before.y + sum[1], before.z + sum[2], before.w + sum[3]);
        } else if constexpr (G::TOTALS == REGISTERS) {
#pragma unroll
            for (int i = 0; i < 4; ++i) total[r][c][i] += sum[i];
        }
        sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
    }
};

// What becomes of a thread's sums, of a tile all of whose rows and columns exist, in even rows. rows: the layer's
// outputs, of gates and ups half of its weight rows.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void write_whole(
    const Sums<G>& total, const Lane<G>& lane, const T* bias, const Output& output, const Place& place, int rows) {
    __builtin_assume(rows % 2 == 0);
    float2 added[G::COLUMN_TILES] = {};
#pragma unroll
    for (int c = 0; c < G::COLUMN_TILES; ++c) {
        const int s = c % G::SUMS, n = place.column + lane.weight_row_of(c - s);
        if (bias != nullptr) added[c] = read_two(bias + s * rows + n, n, rows);
    }
#pragma unroll
    for (int i = 0; i < 2 * G::ROW_TILES; ++i) {
        const int r = i / 2, half = i % 2, b = place.row + lane.row_of(r, half);
        float2 before[G::COLUMN_TILES];
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; c += G::SUMS)
            before[c] = output.before_two(b, place.column + lane.weight_row_of(c), rows);
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; c += G::SUMS) {
            float2 one[G::SUMS];
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s)
                one[s] = make_float2(total[r][c + s][2 * half] + added[c + s].x,
                                     total[r][c + s][2 * half + 1] + added[c + s].y);
            output.two(b, place.column + lane.weight_row_of(c), rows, one, before[c]);
        }
    }
}

// The same of other tiles.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void write_part(
    const Sums<G>& total, const Lane<G>& lane, const T* bias, const Output& output, const Place& place, int batch,
    int rows) {
    for_each_sum<G>([&](int r, int c, int i) {
        const int b = place.row + lane.row_of(r, i / 2), n = place.column + lane.weight_row_of(c) + i % 2;
        if (c % G::SUMS != 0 || b >= batch || n >= rows) return;
        float one[G::SUMS];
#pragma unroll
        for (int s = 0; s < G::SUMS; ++s) {
            one[s] = total[r][c + s][i];
            if (bias != nullptr) one[s] += to_float(bias[s * rows + n]);
        }
        output(b, n, rows, one, output.before(b, n, rows));
    });
}

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

template <typename T, typename G, typename Output>
__device__ __forceinline__ void finish(
    Sums<G>& total, const Lane<G>& lane, const T* bias, const Output& output, const Place& place, const Linear& linear,
    int rows) {
    if constexpr (G::ADAPTED) add_adapters<T, G>(total, lane, linear, place);
    if (place.row + G::ROWS <= linear.batch && place.column + G::UNIT <= rows && rows % 2 == 0)
        write_whole<T, G>(total, lane, bias, output, place, rows);
    else write_part<T, G>(total, lane, bias, output, place, linear.batch, rows);
}

// Grid: as many blocks as run at once, or where groups are joined one for each tile. Dynamic shared memory: the ring of
// stages, then totals.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void multiply(
    const TiledLinear& arguments, const T* weight, int rows, const T* bias, const Output& output) {
    extern __shared__ __align__(128) char shared[];
    static_assert(G::STAGE_BYTES == HOST_STAGE_BYTES, "as the host counts them");
    const Linear& linear = arguments.linear;
    const int team_columns = SLICES_OF_A_GROUP * linear.steps * 32;
    const int own_columns = G::TEAMS > 1 ? min(team_columns, linear.columns) : linear.columns;
    const Operands<T> operands{weight, static_cast<const T*>(arguments.input), arguments.stride, linear.batch, rows,
                               linear.columns, team_columns, {arguments.selected, arguments.tokens}};
    launch_next_kernel();
    const Work work(G::ROWS, G::UNIT, linear.batch, rows, (own_columns + G::STAGE_COLUMNS - 1) / G::STAGE_COLUMNS);
    using Weights = WeightsOf<T, G>;
    Copies<T, G, typename Weights::Copies> chunks(operands, work, shared);
    const Lane<G> lane;
    float4* totals = reinterpret_cast<float4*>(shared + STAGES * G::STAGE_BYTES) + threadIdx.x;
    const unsigned zero = linear.adapters.low_units;  // which only kernels of few rows have
    TileSums<T, G> sums(totals, linear.steps);
    typename Weights::Fragments fragments(zero);
    fragments.read(chunks.next_stage(), lane);
    for (int tile = blockIdx.x; tile < work.tiles; tile += gridDim.x) {
        sums.begin();
#pragma unroll 1
        for (int chunk = 0; chunk < work.chunks; ++chunk) {
            chunks.copy();
            const char* stage = chunks.stage();
            // Behind the last chunk of the last tile something is read that nobody multiplies.
            const auto next = [&] { return chunks.next_stage(); };
            if constexpr (G::IS_PACKED) {
                sums.template multiply<0>(fragments, stage, lane, next);
                sums.template multiply<1>(fragments, stage, lane, next);
                sums.template multiply<2>(fragments, stage, lane, next);
                sums.template multiply<3>(fragments, stage, lane, next);
            } else {
                const char* second = stage + G::STEP_BYTES;
                sums.template multiply<0>(fragments, stage, lane, [&] { return second; });
                sums.template multiply<1>(fragments, second, lane, next);
            }
        }
        const Place place = work.place_of(tile);
        if constexpr (G::TOTALS == JOINED) {
            constexpr int HIGH = G::ROW_TILES, WIDE = G::TEAMS / HIGH;  // parts of a warp's tiles
            using Part = Geometry<1, G::COLUMN_TILES / WIDE, HIGH * G::ROW_WARPS, WIDE * G::COLUMN_WARPS, REGISTERS,
                                  G::PAIRED, G::ADAPTED, G::SCALES, G::MODE>;
            const int team = threadIdx.x / G::TEAM, warp = threadIdx.x % G::TEAM / 32;
            const Lane<Part> own(warp % G::ROW_WARPS * HIGH + team / WIDE, warp / G::ROW_WARPS * WIDE + team % WIDE);
            Sums<Part> joined;
            sums.template join<Part>(joined, shared);
            if constexpr (G::IS_PACKED) turn<Part>(joined);
            finish<T, Part>(joined, own, bias, output, place, linear, rows);
        } else {
            sums.end();
            if constexpr (G::IS_PACKED) turn<G>(sums.total);
            finish<T, G>(sums.total, lane, bias, output, place, linear, rows);
        }
    }
}

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
