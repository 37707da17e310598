// Linear layers of up to 64 rows of activations on GPUs with many multiprocessors: four warps share K, so that tiles of few
// weight rows, of which there are enough for all multiprocessors, keep a block busy.
//
// Each warp multiplies one group of slices. Its threads copy the very weights and activations that they multiply, some
// steps of 32 columns ahead, and of the next tile while the last one is joined: no barrier holds them but the one behind
// which the sums of the groups are added, in their order. So a row gets the bits of the decode step. The first steps'
// weights are copied before the kernel waits for its predecessor.
#include "decode/direct_copies.cuh"

namespace decode {
namespace direct {

// A block's tile: TOKEN_TILES of 16 rows of activations, WEIGHT_TILES of 8 weight rows. A step's copies go to a slot of the
// ring of DEPTH of them. The others as `Geometry` has them.
template <int TOKEN_TILES_, int WEIGHT_TILES_, int DEPTH_, int EVERY_, bool PAIRED> struct GroupGeometry {
    static constexpr int TOKEN_TILES = TOKEN_TILES_, WEIGHT_TILES = WEIGHT_TILES_, DEPTH = DEPTH_, EVERY = EVERY_;
    static constexpr int ROW_TILES = TOKEN_TILES, COLUMN_TILES = WEIGHT_TILES;  // of sums
    static constexpr int THREADS = 32 * GROUPS, SUMS = PAIRED ? 2 : 1, UNIT = 8 * WEIGHT_TILES / SUMS;
    static constexpr int SLOT_BYTES = (WEIGHT_TILES + 2 * TOKEN_TILES) * THREADS * 16, RING_BYTES = DEPTH * SLOT_BYTES;
    static constexpr int OUTPUTS = TOKEN_TILES * WEIGHT_TILES / SUMS;   // of a lane, four each
    static constexpr int OWN_OUTPUTS = (OUTPUTS + GROUPS - 1) / GROUPS;  // that a warp writes
    static_assert(WEIGHT_TILES % SUMS == 0, "pairs of tiles");

    static __device__ int first_row(int c) { return c / SUMS * 8; }
};

// Rows of activations, of which each thread has the same columns as of weights.
template <typename T, typename G> struct OwnRows {
    const T* row[2 * G::TOKEN_TILES];
    int exist;  // by bits

    __device__ explicit OwnRows(const TiledLinear& arguments) : exist(0) {
        const SelectedRows source{arguments.selected, arguments.tokens};
#pragma unroll
        for (int i = 0; i < 2 * G::TOKEN_TILES; ++i) {
            const int b = i * 8 + own_row();
            const bool exists = b < arguments.linear.batch;
            exist |= exists << i;
            row[i] = static_cast<const T*>(arguments.input);
            if (exists) row[i] += static_cast<size_t>(source(b)) * arguments.stride;
        }
    }
    // Those from column `column` on, behind the weights at `slot`.
    __device__ void copy(unsigned slot, int column, int columns) const {
        const int inside = column < columns ? exist : 0;
#pragma unroll
        for (int i = 0; i < 2 * G::TOKEN_TILES; ++i)
            copy_async_16(slot + (G::WEIGHT_TILES + i) * G::THREADS * 16, row[i] + column, inside >> i & 1);
    }
};

// Of a tile of activations, both halves of the operand of a step from where the thread itself has copied them.
template <typename G> __device__ __forceinline__ void read_rows(uint4 (&rows)[2], unsigned slot, int t) {
    const unsigned place = slot + (G::WEIGHT_TILES + 2 * t) * G::THREADS * 16;
    const uint4 low = read_shared_16(place), high = read_shared_16(place + G::THREADS * 16);
    rows[0] = make_uint4(low.x, high.x, low.y, high.y);
    rows[1] = make_uint4(low.z, high.z, low.w, high.w);
}

// The outputs of a tile from column `first` on that a warp writes, as pairs of columns; what they need beside sums.
template <typename T, typename G, typename Output> struct OwnOutputs {
    static constexpr int PLACES = G::TOKEN_TILES * G::WEIGHT_TILES * 2 * 32, COLUMNS = G::WEIGHT_TILES / G::SUMS;
    const Linear& linear;
    const Output& output;
    const T* bias;
    float2 before[G::OWN_OUTPUTS][2], biases[G::OWN_OUTPUTS][2][G::SUMS];

    __device__ OwnOutputs(const Linear& linear, const Output& output)
        : linear(linear), output(output), bias(static_cast<const T*>(linear.bias)) {}
    template <typename Action> __device__ __forceinline__ void for_each(int first, const Action& action) const {
#pragma unroll
        for (int i = 0; i < G::OWN_OUTPUTS; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = i * GROUPS + threadIdx.x / 32, t = at / COLUMNS, c = at % COLUMNS;
                const int b = t * 16 + half * 8 + own_row(), n = first + c * 8 + own_quad() * 2;
                if (at < G::OUTPUTS && b < linear.batch && n < linear.rows) action(i, half, b, n);
            }
    }
    __device__ __forceinline__ void read(int first) {
        for_each(first, [&](int i, int half, int b, int n) {
            before[i][half] = output.before_two(b, n, linear.rows);
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s)
                if (bias != nullptr) biases[i][half][s] = read_two(bias + s * linear.rows + n, n, linear.rows);
        });
    }
    // Adds the sums of all warps, the first group first. `area`: float2 [GROUPS, TOKEN_TILES, WEIGHT_TILES, 2, 32].
    __device__ __forceinline__ void join(float2* area, const Sums<G>& group, int first) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        __syncthreads();  // the area has been read
#pragma unroll
        for (int t = 0; t < G::TOKEN_TILES; ++t)
#pragma unroll
            for (int c = 0; c < G::WEIGHT_TILES; ++c)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    area[warp * PLACES + ((t * G::WEIGHT_TILES + c) * 2 + half) * 32 + lane] =
                        make_float2(group[t][c][2 * half], group[t][c][2 * half + 1]);
        __syncthreads();
        for_each(first, [&](int i, int half, int b, int n) {
            const float2* place = area + ((i * GROUPS + warp) * G::SUMS * 2 + half) * 32 + lane;
            float2 sums[G::SUMS];
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s, place += 64) {
                sums[s] = place[0];
#pragma unroll
                for (int g = 1; g < GROUPS; ++g) sums[s].x += place[g * PLACES].x, sums[s].y += place[g * PLACES].y;
                if (bias != nullptr) sums[s].x += biases[i][half][s].x, sums[s].y += biases[i][half][s].y;
            }
            output.two(b, n, linear.rows, sums, before[i][half]);
        });
    }
};

// Grid (blocks), which walk over the tiles. Dynamic shared memory: the ring and the area of `join`.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void multiply_groups(const TiledLinear& arguments, const Output& output) {
    extern __shared__ __align__(16) char shared[];
    const Linear& linear = arguments.linear;
    const int tiles = (linear.rows + G::UNIT - 1) / G::UNIT;
    const int steps = SLICES_OF_A_GROUP * linear.steps, begin = threadIdx.x / 32 * steps;

    launch_next_kernel();
    Weights<T, G> weights(linear, tiles, begin, begin + steps, shared_address(shared));
#pragma unroll
    for (int i = 0; i < G::DEPTH - 1; ++i) weights.copy(i % BLOCK_STEPS);
    wait_for_previous_kernel();
    const OwnRows<T, G> activations(arguments);
    const int first_column = begin * 32 + own_quad() * 8;
    int column = first_column;
#pragma unroll
    for (int i = 0; i < G::DEPTH - 1; ++i) {
        activations.copy(weights.ring + i * G::SLOT_BYTES, column, linear.columns);
        commit_copies();
        column += 32;
        if (column >= (begin + steps) * 32) column = first_column;  // of the next tile
    }
    OwnOutputs<T, G, Output> outputs(linear, output);
    outputs.read(blockIdx.x * G::UNIT);
    wait_for_copies<G::DEPTH - 2>();
    unsigned slot = weights.ring;  // of what is multiplied
    uint4 rows[2][2];              // that, and what is read meanwhile
    Held<G> held[2];
    read_slot<G>(held[0], slot);
    read_rows<G>(rows[0], slot, 0);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        Sums<G> sum = {}, group = {};
        if (tile != blockIdx.x) outputs.read(tile * G::UNIT);
        int steps_left = linear.steps;
        for (int block = 0; block < linear.steps; ++block) {
            const bool begins = steps_left == linear.steps;  // a slice
#pragma unroll
            for (int d = 0; d < BLOCK_STEPS; ++d) {
                constexpr int AHEAD = G::DEPTH - 1;  // the step goes to where the one before `slot` lay
                const int step = (d + AHEAD) % BLOCK_STEPS;
                activations.copy(weights.slot, weights.column + step * 32, linear.columns);
                weights.copy(step);
                wait_for_copies<G::DEPTH - 2>();
                const unsigned next = weights.following(slot);
                read_slot<G>(held[(d + 1) % 2], next);
#pragma unroll
                for (int t = 0; t < G::TOKEN_TILES; ++t) {
                    const int turn = d * G::TOKEN_TILES + t;
                    const bool last = t + 1 == G::TOKEN_TILES;
                    read_rows<G>(rows[(turn + 1) % 2], last ? next : slot, last ? 0 : t + 1);
                    multiply<T, G>(sum[t], rows[turn % 2], held[d % 2], G::EVERY == BLOCK_STEPS && d == 0 && begins);
                }
                slot = next;
                if ((d + 1) % G::EVERY != 0) continue;
                steps_left -= G::EVERY;
                if (steps_left == 0) {
                    steps_left = linear.steps;
                    for_each_sum<G>([&](int t, int c, int i) {
                        group[t][c][i] += sum[t][c][i];
                        if (G::EVERY != BLOCK_STEPS) sum[t][c][i] = 0.f;
                    });
                }
            }
        }
        outputs.join(reinterpret_cast<float2*>(shared + G::RING_BYTES), group, tile * G::UNIT);
    }
}

#define GROUP_KERNEL(NAME)                                                        \
    template <typename T, int TOKEN_TILES, int WEIGHT_TILES, int DEPTH, int EVERY> \
    __global__ void __launch_bounds__(32 * GROUPS, 1) NAME(const __grid_constant__ TiledLinear arguments)

// output = scale (input weight^T + bias)
GROUP_KERNEL(group_linear) {
    const FloatOutput output = float_output(arguments.output, arguments.linear);
    multiply_groups<T, GroupGeometry<TOKEN_TILES, WEIGHT_TILES, DEPTH, EVERY, false>>(arguments, output);
}

// output = activation(gate) up of input weight^T + bias
GROUP_KERNEL(group_gate_up) {
    const GatedOutput<T> output{static_cast<T*>(arguments.output), arguments.activation};
    multiply_groups<T, GroupGeometry<TOKEN_TILES, WEIGHT_TILES, DEPTH, EVERY, true>>(arguments, output);
}

// output = residual + scale (input weight^T + bias), of the rows of input and residual that are selected, or of all
GROUP_KERNEL(group_linear_residual) {
    using G = GroupGeometry<TOKEN_TILES, WEIGHT_TILES, DEPTH, EVERY, false>;
    multiply_groups<T, G>(arguments, residual_output<T>(arguments));
}
#undef GROUP_KERNEL

}  // namespace direct
}  // namespace decode
