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
    Weights<G, const char*> weights(
        linear, tiles, blocks, shared_address(shared), [](int own) { return threadIdx.x / 32 * own; });
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
    JoinedOutputs<T, G, ADAPTED, Output> outputs(linear, output);
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
                for (int i = 0; i < G::TILES; ++i) held.tiles[i].begin(groups[i], d, mask);
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
                if (steps_left == 0) steps_left = linear.steps, add_to<G>(group, sum);
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
