// Linear layers over weights of 4 to 8 bits, of up to 64 rows of activations, on every GPU.
//
// The sums are those of the other linear layers over the weights that `PackedWeight.values` gives: each code, less its zero
// point, times its scale, rounded to T, then multiplied on the tensor cores in the same order, which depends on K alone.
// Weights are the operand of 16 rows, so that up to eight rows of activations take one instruction for 16 x 16 weights, and
// that what a lane copied becomes operands without a move.
#include "decode/adapters.cuh"
#include "decode/packed_copies.cuh"

namespace decode {
namespace packed {

// The outputs of a tile that a thread writes, as pairs of columns, and what they need beside sums.
template <typename T, typename G, bool ADAPTED, typename Output> struct OwnOutputs {
    static constexpr int PAIRS = G::UNIT / 2, EACH = (8 * G::TOKEN_TILES * PAIRS + G::THREADS - 1) / G::THREADS;
    static constexpr bool EARLY = EACH <= 2;  // registers hold what is read before the products
    const Linear& linear;
    const Output& output;
    float2 before[EACH], biases[EACH][G::SUMS];

    __device__ OwnOutputs(const Linear& linear, const Output& output) : linear(linear), output(output) {}
    template <typename Action> __device__ __forceinline__ void for_each(int first, const Action& action) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = i * G::THREADS + threadIdx.x, b = at / PAIRS, column = at % PAIRS * 2;
            if (b < linear.batch && first + column < linear.rows) action(i, b, column);
        }
    }
    __device__ __forceinline__ void read(int first) {
        const T* bias = static_cast<const T*>(linear.bias);
        for_each(first, [&](int i, int b, int column) {
            const int n = first + column;
            before[i] = output.before_two(b, n, linear.rows);
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s)
                if (bias != nullptr) biases[i][s] = read_two(bias + s * linear.rows + n, n, linear.rows);
        });
    }
    // Adds the warps' sums at `area` [WARPS, rows of activations, STRIDE]: of slices to those of groups, of groups in order;
    // then what adapters add, at `added`.
    __device__ __forceinline__ void write(const float* area, const float* added, int first) const {
        constexpr int PARTS = G::WARPS / GROUPS;
        for_each(first, [&](int i, int b, int column) {
            float2 sums[G::SUMS];
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s) {
                const int place = G::SUMS == 1 ? column : column / 8 * 16 + column % 8 + s * 8;
                const float* own = area + b * G::STRIDE + place;
                sums[s] = make_float2(0.f, 0.f);
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
                    float2 group = make_float2(0.f, 0.f);
#pragma unroll
                    for (int p = 0; p < PARTS; ++p, own += G::PLACES) {
                        const float2 one = *reinterpret_cast<const float2*>(own);
                        group.x += one.x, group.y += one.y;
                    }
                    sums[s].x += group.x, sums[s].y += group.y;
                }
                if constexpr (ADAPTED) {
                    const float2 one = *reinterpret_cast<const float2*>(added + b * G::STRIDE + place);
                    sums[s].x += one.x, sums[s].y += one.y;
                }
                if (linear.bias != nullptr) sums[s].x += biases[i][s].x, sums[s].y += biases[i][s].y;
            }
            output.two(b, first + column, linear.rows, sums, before[i]);
        });
    }
};

template <typename G> using Sums = float[G::WEIGHT_TILES][G::TOKEN_TILES][4];

template <typename G> __device__ __forceinline__ void leave_sums(float* area, const Sums<G>& sums, int batch) {
    float* own = area + threadIdx.x / 32 * G::PLACES + own_row();
#pragma unroll
    for (int t = 0; t < G::TOKEN_TILES; ++t)
#pragma unroll
        for (int second = 0; second < 2; ++second) {
            const int b = t * 8 + own_quad() * 2 + second;
            if (b >= batch) continue;
#pragma unroll
            for (int m = 0; m < G::WEIGHT_TILES; ++m)
                own[b * G::STRIDE + m * 16] = sums[m][t][second], own[b * G::STRIDE + m * 16 + 8] = sums[m][t][2 + second];
        }
}

// Leaves at `area` [rows of activations, STRIDE] what adapters add to a tile, from zero; their products of A are there. It is
// multiplied as in tiled_sums.cuh, 16 rows of activations times 8 columns at a time.
template <typename T, typename G>
__device__ __forceinline__ void leave_added(const AdaptedRows<T>& adapters, float* area, int first, int rows) {
    constexpr int TILES = 2 * G::WEIGHT_TILES, UNITS = (G::TOKEN_TILES + 1) / 2 * TILES;
#pragma unroll 1
    for (int unit = threadIdx.x / 32; unit < UNITS; unit += G::WARPS) {
        const int row = unit / TILES * 16 + own_row(), tile = unit % TILES;
        const int column = G::SUMS == 1 ? first + tile * 8 : first + tile / 2 * 8 + tile % 2 * rows;
        const int module = adapters.module_of(column);
        float added[4] = {};
#pragma unroll 1
        for (unsigned left = adapters.used; left != 0; left &= left - 1) {
            const int place = __ffs(left) - 1;
            const bool taken_by[2] = {adapters.takes(row, place), adapters.takes(row + 8, place)};
            float sum[4] = {};
#pragma unroll 1
            for (int k = 0; k < adapters.given.rank; k += 16) {
                unsigned right[2][2], products[2][2];
                adapters.read_b(right, place, module, column + own_row(), k);
                adapters.read_low(products, taken_by, place, module, row, k);
                const unsigned lower = right[0][0] | right[0][1] << 16, upper = right[1][0] | right[1][1] << 16;
                adapters.template multiply<2>(sum, products, lower, upper);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) added[i] += sum[i];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int b = row + i / 2 * 8;
            if (b < 8 * G::TOKEN_TILES) area[b * G::STRIDE + tile * 8 + own_quad() * 2 + i % 2] = added[i];
        }
    }
}

// The tensor cores' operands of a step, of 16 weight rows each.
template <typename T, typename G> struct Operands {
    unsigned low[G::WEIGHT_TILES][4], high[G::WEIGHT_TILES][4];

    __device__ __forceinline__ Operands(const Held<G>& held, const Group<T, G::MODE> (&groups)[G::TILES], int step, unsigned mask) {
#pragma unroll
        for (int m = 0; m < G::WEIGHT_TILES; ++m) {
            held.tiles[2 * m].values(groups[2 * m], step, mask, low[m]);
            held.tiles[2 * m + 1].values(groups[2 * m + 1], step, mask, high[m]);
        }
    }
    // Times the rows of tiles of activations from the first one on. Products of one sum stand far apart: each waits for the
    // one before.
    __device__ __forceinline__ void multiply(Sums<G>& sum, const uint4 (&rows)[G::TOGETHER], int first) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int m = 0; m < G::WEIGHT_TILES; ++m) {
                const unsigned a0[2] = {low[m][2 * half], high[m][2 * half]};
                const unsigned a2[2] = {low[m][2 * half + 1], high[m][2 * half + 1]};
#pragma unroll
                for (int t = 0; t < G::TOGETHER; ++t)
                    multiply_add(sum[m][first + t], a0, a2, half == 0 ? rows[t].x : rows[t].z,
                                 half == 0 ? rows[t].y : rows[t].w, T());
            }
    }
};

template <typename G> __device__ __forceinline__ void add_slice(Sums<G>& group, Sums<G>& sum) {
#pragma unroll
    for (int m = 0; m < G::WEIGHT_TILES; ++m)
#pragma unroll
        for (int t = 0; t < G::TOKEN_TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) group[m][t][i] += sum[m][t][i], sum[m][t][i] = 0.f;
}

// Grid (blocks), which walk over the tiles. ADAPTED: with LoRA adapters, whose products of A another kernel made before.
template <typename T, typename G, bool ADAPTED, typename Output>
__device__ __forceinline__ void multiply_packed(const TiledLinear& arguments, const Output& output) {
    extern __shared__ __align__(16) char shared[];
    const Linear& linear = arguments.linear;
    float* area = reinterpret_cast<float*>(shared + G::SUMS_BEGIN);
    float* added = reinterpret_cast<float*>(shared + G::shared_bytes(linear.batch, SLICES * linear.steps));
    const int tiles = (linear.rows + G::UNIT - 1) / G::UNIT;
    const int blocks = G::WARPS == GROUPS ? linear.steps : linear.steps / BLOCK_STEPS, steps = blocks * BLOCK_STEPS;

    launch_next_kernel();
    Weights<G> weights(linear, tiles, blocks, shared_address(shared));
#pragma unroll
    for (int i = 0; i < G::DEPTH - 1; ++i) {
        weights.copy();
        if (G::STAYS) commit_copies();
    }
    wait_for_previous_kernel();
    Activations<T, G> activations(arguments, weights.first * BLOCK_STEPS, steps, shared_address(shared + G::INPUT_BEGIN));
    if constexpr (G::STAYS) {
        commit_copies();
    } else {
#pragma unroll
        for (int i = 0; i < G::AHEAD - 1; ++i) {
            activations.copy();
            commit_copies();
        }
    }
    AdaptedRows<T> adapters(linear.adapters, linear.batch, linear.width * G::SUMS);
    if constexpr (ADAPTED) adapters.read_scales();
    OwnOutputs<T, G, ADAPTED, Output> outputs(linear, output);
    if (outputs.EARLY) outputs.read(blockIdx.x * G::UNIT);
    wait_for_copies<G::STAYS ? 0 : G::AHEAD - 2>();
    __syncwarp();
    const unsigned mask = linear.batch > 0 ? LOW : 0;  // for the compiler no constant, of which it would make many copies
    unsigned slot = weights.ring, place = activations.first_place();
    Held<G> held;
    uint4 rows[2][G::TOGETHER];  // what is multiplied, and what is read meanwhile
    held.read(slot);
    activations.read(rows[0], place, 0);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        Sums<G> sum = {}, group = {};
        if (outputs.EARLY && tile != blockIdx.x) outputs.read(tile * G::UNIT);
        if constexpr (ADAPTED)
            for (int s = 0; s < G::SUMS; ++s) adapters.fetch(linear.first + tile * G::UNIT + s * linear.rows, G::UNIT, G::THREADS);
        int steps_left = linear.steps;
#pragma unroll 1
        for (int block = 0; block < blocks; ++block) {
            Group<T, G::MODE> groups[G::TILES];
#pragma unroll
            for (int d = 0; d < BLOCK_STEPS; ++d) {
                if (!G::STAYS) activations.copy();
                if (d == 0) weights.copy();
                if (!G::STAYS || d == 0) commit_copies();
                if (d == BLOCK_STEPS - 1) {
                    wait_for_copies<G::STAYS ? G::DEPTH - 2 : G::AHEAD - 2>();
                    __syncwarp();  // other lanes' scales have come, and those before have been read
                    slot = weights.following(slot);
                } else if (!G::STAYS) {
                    wait_for_copies<G::AHEAD - 2>();
                }
                const unsigned following = activations.following(place, d);
#pragma unroll
                for (int i = 0; i < G::TILES; ++i) held.tiles[i].begin(groups[i], d);
                const Operands<T, G> operands(held, groups, d, mask);
                if (d == BLOCK_STEPS - 1) held.read(slot);
                constexpr int PARTS = G::TOKEN_TILES / G::TOGETHER;
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    const int turn = d * PARTS + part;
                    const bool last = part + 1 == PARTS;
                    activations.read(rows[(turn + 1) % 2], last ? following : place, last ? 0 : (part + 1) * G::TOGETHER);
                    operands.multiply(sum, rows[turn % 2], part * G::TOGETHER);
                }
                place = following;
                if (G::WARPS != GROUPS || (d + 1) % G::EVERY != 0) continue;
                steps_left -= G::EVERY;
                if (steps_left == 0) steps_left = linear.steps, add_slice<G>(group, sum);
            }
        }
        __syncthreads();  // the area has been read
        leave_sums<G>(area, G::WARPS == GROUPS ? group : sum, linear.batch);
        if constexpr (ADAPTED) leave_added<T, G>(adapters, added, linear.first + tile * G::UNIT, linear.rows);
        if (!outputs.EARLY) outputs.read(tile * G::UNIT);
        __syncthreads();
        outputs.write(area, added, tile * G::UNIT);
    }
}

#define PACKED_KERNEL(NAME)                                                                                            \
    template <typename T, int TOKEN_TILES, int WEIGHT_TILES, int WARPS, int DEPTH, int EVERY, int SCALES, int MODE,     \
              int AHEAD, int BLOCKS, bool ADAPTED = false>                                                             \
    __global__ void __launch_bounds__(32 * WARPS, BLOCKS) NAME(const __grid_constant__ TiledLinear arguments)
#define PACKED_GEOMETRY(PAIRED) Geometry<TOKEN_TILES, WEIGHT_TILES, WARPS, DEPTH, EVERY, SCALES, MODE, AHEAD, PAIRED>

// output = scale (input weight^T + bias)
PACKED_KERNEL(linear) {
    const FloatOutput output = float_output(arguments.output, arguments.linear);
    multiply_packed<T, PACKED_GEOMETRY(false), ADAPTED>(arguments, output);
}

// output = activation(gate) up of input weight^T + bias
PACKED_KERNEL(gate_up) {
    const GatedOutput<T> output{static_cast<T*>(arguments.output), arguments.activation};
    multiply_packed<T, PACKED_GEOMETRY(true), ADAPTED>(arguments, output);
}

// output = residual + scale (input weight^T + bias), of the rows of input and residual that are selected, or of all
PACKED_KERNEL(linear_residual) {
    multiply_packed<T, PACKED_GEOMETRY(false), ADAPTED>(arguments, residual_output<T>(arguments));
}
#undef PACKED_KERNEL
#undef PACKED_GEOMETRY

}  // namespace packed
}  // namespace decode
