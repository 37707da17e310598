// Linear layers of up to 64 rows of activations on GPUs with few multiprocessors and no tensor memory accelerator: each
// thread copies the very weights that it multiplies.
//
// A warp has its own weight rows, 16 or 32, times all rows of activations, for all of K. Its threads copy their parts of
// some steps of 32 columns ahead, into a ring of their own in shared memory, and of the next tile while the sums of the
// last one are written: no barrier holds what limits these layers. (Loads into registers would wait for the youngest
// one: the compiler gives all of a loop's one scoreboard; copies complete in order.) Activations, which all warps
// multiply, come in chunks of many steps, with one barrier of the block for each chunk; where all of K finds room, they
// are copied once and stay. Every sum has the order of linear.cu: slices of K from zero, four slices a group, then the
// groups. So a row gets the bits of the decode step.
#include "decode/direct_copies.cuh"

namespace decode {
namespace direct {

// A thread's sums over the groups that have ended, in registers or in shared memory. The last group of a tile is added to
// them where it lies.
template <typename G> struct Total {
    Sums<G> sum = {};
    int groups = 0;

    __device__ explicit Total(char*) {}
    // Adds a group, which then begins anew.
    __device__ void add(Sums<G>& group) {
        ++groups;
        add_to<G>(sum, group);
    }
    // Adds the groups to the last one of the tile.
    __device__ void finish(Sums<G>& group) {
        groups = 0;
        add_to<G>(group, sum);
    }
};

template <typename G> struct SharedTotal {
    float4* sum;  // [SUM_REGISTERS / 4, THREADS], of the thread
    int groups = 0;

    __device__ explicit SharedTotal(char* shared) : sum(reinterpret_cast<float4*>(shared) + threadIdx.x) {}
    __device__ float4& place(int t, int c) const { return sum[(t * G::WEIGHT_TILES + c) * G::THREADS]; }
    __device__ void add(Sums<G>& group) {
        if (groups++ > 0) take(group);
#pragma unroll
        for (int t = 0; t < G::TOKEN_TILES; ++t)
#pragma unroll
            for (int c = 0; c < G::WEIGHT_TILES; ++c) {
                float(&own)[4] = group[t][c];
                place(t, c) = make_float4(own[0], own[1], own[2], own[3]);
                own[0] = own[1] = own[2] = own[3] = 0.f;
            }
    }
    __device__ void finish(Sums<G>& group) {
        if (groups > 0) take(group);
        groups = 0;
    }
    __device__ void take(Sums<G>& group) const {
#pragma unroll
        for (int t = 0; t < G::TOKEN_TILES; ++t)
#pragma unroll
            for (int c = 0; c < G::WEIGHT_TILES; ++c) {
                const float4 before = place(t, c);
                float(&own)[4] = group[t][c];
                own[0] += before.x, own[1] += before.y, own[2] += before.z, own[3] += before.w;
            }
    }
};

// What becomes of a thread's sums.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void write(
    const Sums<G>& total, const T* bias, const Output& output, int first, int batch, int rows) {
    constexpr int AT_ONCE = 8 / G::WEIGHT_TILES;  // token tiles of which `before` is read before any of them is written
    float2 before[AT_ONCE][G::WEIGHT_TILES][2];
#pragma unroll
    for (int part = 0; part < G::TOKEN_TILES; part += AT_ONCE) {
        const auto for_each = [&](bool writes) {
#pragma unroll
            for (int t = part; t < part + AT_ONCE && t < G::TOKEN_TILES; ++t)
#pragma unroll
                for (int c = 0; c < G::WEIGHT_TILES; c += G::SUMS)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int b = t * 16 + half * 8 + own_row(), n = first + G::first_row(c) + own_quad() * 2;
                        if (b >= batch || n >= rows) continue;
                        float2& own = before[t - part][c][half];
                        if (!writes) {
                            own = output.before_two(b, n, rows);
                            continue;
                        }
                        float2 sums[G::SUMS];
#pragma unroll
                        for (int s = 0; s < G::SUMS; ++s)
                            sums[s] = make_float2(total[t][c + s][2 * half], total[t][c + s][2 * half + 1]);
                        write_sums<T>(sums, bias, output, b, n, rows, own);
                    }
        };
        for_each(false);
        for_each(true);
    }
}

// Grid (blocks), which walk over the tiles. Dynamic shared memory: the rings of weights, sums in all, where they lie there,
// and the stages of activations.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void multiply_tiles(const TiledLinear& arguments, const Output& output) {
    extern __shared__ __align__(16) char shared[];
    const Linear& linear = arguments.linear;
    const int tiles = (linear.rows + G::UNIT - 1) / G::UNIT;
    const int chunks = (linear.columns + G::CHUNK_STEPS * 32 - 1) / (G::CHUNK_STEPS * 32);
    constexpr int BLOCKS = G::CHUNK_STEPS / BLOCK_STEPS;  // of a chunk
    const int blocks = chunks * BLOCKS, own_tiles = (tiles - static_cast<int>(blockIdx.x) + gridDim.x - 1) / gridDim.x;

    launch_next_kernel();
    const unsigned memory = shared_address(shared);
    Weights<T, G> weights(linear, tiles, 0, blocks * BLOCK_STEPS, memory);
    Activations<T, G> activations(arguments, memory + G::STAGES, chunks, own_tiles);
    wait_for_previous_kernel();
    activations.copy_chunk();
    commit_copies();
#pragma unroll
    for (int i = 0; i < G::DEPTH; ++i) {
        if (0 < i && i < activations.ahead) activations.copy_chunk();
        weights.copy(i % BLOCK_STEPS);
    }
    wait_for_copies<G::DEPTH>();
    __syncthreads();
    uint4 rows[2][2];  // what is multiplied, and what is read meanwhile
    const unsigned zero = static_cast<unsigned>(arguments.stages) >> 31;
    const auto read = [&](unsigned fragment, uint4 (&target)[2]) {
        order_rows(target, read_shared_16(fragment), read_shared_16(fragment + 512), zero);
    };
    unsigned chunk = memory + G::STAGES + threadIdx.x % 32 * 16, place = chunk;
    read(place, rows[0]);
    Held<G> held[2];  // the same of weights
    weights.read(held[0]);
    int block_of_chunk = 0;
    typename Choose<G::LEAVES_TOTAL, SharedTotal<G>, Total<G>>::type total(shared + G::TOTAL);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        Sums<G> sum = {}, group = {};
        int steps_left = linear.steps, slices_left = SLICES_OF_A_GROUP;
        for (int block = 0; block < blocks; ++block) {
            const bool begins = steps_left == linear.steps;  // a slice
#pragma unroll
            for (int d = 0; d < BLOCK_STEPS; ++d) {
                weights.copy((d + G::DEPTH) % BLOCK_STEPS);  // where the step lay that is in registers now
                weights.read(held[(d + 1) % 2]);
                activations.step(d);
#pragma unroll
                for (int t = 0; t < G::TOKEN_TILES; ++t) {
                    const int turn = d * G::TOKEN_TILES + t;
                    unsigned following = place + (turn + 1) * FRAGMENT_BYTES;
                    if (turn + 1 == BLOCK_STEPS * G::TOKEN_TILES) {
                        if (++block_of_chunk == BLOCKS) block_of_chunk = 0, following = chunk = activations.next(chunk);
                        place = following;
                    }
                    read(following, rows[(turn + 1) % 2]);
                    multiply<T, G>(sum[t], rows[turn % 2], held[d % 2], G::EVERY == BLOCK_STEPS && d == 0 && begins);
                }
                if ((d + 1) % G::EVERY != 0) continue;
                steps_left -= G::EVERY;
                if (steps_left == 0) {
                    steps_left = linear.steps;
                    for_each_sum<G>([&](int t, int c, int i) {
                        group[t][c][i] += sum[t][c][i];
                        if (G::EVERY != BLOCK_STEPS) sum[t][c][i] = 0.f;
                    });
                    if (--slices_left == 0 && total.groups < GROUPS - 1) slices_left = SLICES_OF_A_GROUP, total.add(group);
                }
            }
        }
        if (steps_left != linear.steps)  // a slice that K ends
            for_each_sum<G>([&](int t, int c, int i) { group[t][c][i] += sum[t][c][i]; });
        total.finish(group);
        write<T, G>(group, static_cast<const T*>(linear.bias), output, tile * G::UNIT, linear.batch, linear.rows);
    }
}

#define DIRECT_KERNEL(NAME)                                                                                            \
    template <typename T, int TOKEN_TILES, int WEIGHT_TILES, int WARPS, int DEPTH, int CHUNK_STEPS, int EVERY>         \
    __global__ void __launch_bounds__(32 * WARPS, 1) NAME(const __grid_constant__ TiledLinear arguments)

// output = scale (input weight^T + bias)
DIRECT_KERNEL(linear) {
    const FloatOutput output = float_output(arguments.output, arguments.linear);
    multiply_tiles<T, Geometry<TOKEN_TILES, WEIGHT_TILES, WARPS, DEPTH, CHUNK_STEPS, EVERY, false>>(arguments, output);
}

// output = activation(gate) up of input weight^T + bias
DIRECT_KERNEL(gate_up) {
    const GatedOutput<T> output{static_cast<T*>(arguments.output), arguments.activation};
    multiply_tiles<T, Geometry<TOKEN_TILES, WEIGHT_TILES, WARPS, DEPTH, CHUNK_STEPS, EVERY, true>>(arguments, output);
}

// output = residual + scale (input weight^T + bias), of the rows of input and residual that are selected, or of all
DIRECT_KERNEL(linear_residual) {
    using G = Geometry<TOKEN_TILES, WEIGHT_TILES, WARPS, DEPTH, CHUNK_STEPS, EVERY, false>;
    multiply_tiles<T, G>(arguments, residual_output<T>(arguments));
}
#undef DIRECT_KERNEL

}  // namespace direct
}  // namespace decode
