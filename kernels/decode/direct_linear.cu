// Linear layers of up to 64 rows of activations on GPUs without a tensor memory accelerator: each thread copies the very
// weights that it multiplies.
//
// A warp has its own weight rows, 16 or 32, times all rows of activations, for all of K. Its threads copy their parts of
// some steps of 32 columns ahead, into a ring of their own in shared memory, and of the next tile while the sums of the
// last one are written: no barrier holds what limits these layers. (Loads into registers would wait for the youngest
// one: the compiler gives all of a loop's one scoreboard; copies complete in order.) Activations, which all warps
// multiply, come in chunks of many steps, with one barrier of the block for each chunk; where all of K finds room, they
// are copied once and stay. Every sum has the order of linear.cu: slices of K from zero, four slices a group, then the
// groups. So a row gets the bits of the decode step.
#include "decode/many_rows.cuh"

namespace decode {
namespace direct {

constexpr int GROUPS = SLICES / SLICES_OF_A_GROUP;
constexpr int BLOCK_STEPS = 4;  // of 32 columns, unrolled
constexpr int MOST_AHEAD = 3;   // chunks of activations that are copied before they are read
constexpr int FRAGMENT_BYTES = 1024;  // sixteen rows of activations, a step of columns: twice 16 bytes a lane
static_assert(FRAGMENT_BYTES == HOST_FRAGMENT_BYTES, "as the host counts them");

// A warp's tiles: TOKEN_TILES of 16 rows of activations, WEIGHT_TILES of 8 weight rows. DEPTH steps of weights are under
// way; a chunk of activations has CHUNK_STEPS; slices end every so many steps. PAIRED: every second weight tile is of up
// rows, `rows` below the gate rows of the one before.
template <int TOKEN_TILES_, int WEIGHT_TILES_, int WARPS_, int DEPTH_, int CHUNK_STEPS_, int EVERY_, bool PAIRED_>
struct Geometry {
    static constexpr int TOKEN_TILES = TOKEN_TILES_, WEIGHT_TILES = WEIGHT_TILES_, WARPS = WARPS_, THREADS = 32 * WARPS;
    static constexpr int DEPTH = DEPTH_, CHUNK_STEPS = CHUNK_STEPS_, EVERY = EVERY_;
    static constexpr bool PAIRED = PAIRED_;
    static constexpr int SUMS = PAIRED ? 2 : 1;                      // that an output is made of
    static constexpr int UNIT = 8 * WEIGHT_TILES * WARPS / SUMS;     // output columns of a tile
    static constexpr int STEP_BYTES = TOKEN_TILES * FRAGMENT_BYTES;  // of activations
    static constexpr int STAGE_BYTES = CHUNK_STEPS * STEP_BYTES;
    // Sums in all lie in shared memory where a thread's registers hold those of a slice and of a group, and weights of two
    // steps.
    static constexpr int SUM_REGISTERS = 4 * TOKEN_TILES * WEIGHT_TILES, MOST_REGISTERS = THREADS <= 256 ? 255 : 65536 / THREADS;
    static constexpr bool LEAVES_TOTAL = 3 * SUM_REGISTERS + 8 * WEIGHT_TILES + 56 > MOST_REGISTERS;
    static constexpr int SLOT_BYTES = WEIGHT_TILES * THREADS * 16, RING_BYTES = DEPTH * SLOT_BYTES;
    static constexpr int TOTAL = RING_BYTES, STAGES = TOTAL + (LEAVES_TOTAL ? SUM_REGISTERS * THREADS * 4 : 0);
    // Of as many steps, each is some warps' to copy the activations of: one tile of them each.
    static constexpr int TURNS = WARPS / TOKEN_TILES >= 4 ? 4 : WARPS / TOKEN_TILES >= 2 ? 2 : 1;
    static_assert(WARPS >= TOKEN_TILES && BLOCK_STEPS % TURNS == 0, "each tile of activations has a warp");
    static_assert(CHUNK_STEPS % BLOCK_STEPS == 0 && BLOCK_STEPS % EVERY == 0, "steps in blocks");
    static_assert(DEPTH <= CHUNK_STEPS, "activations have come when they are put into order");
    static_assert(WEIGHT_TILES % SUMS == 0, "pairs of tiles");

    static __device__ constexpr int shared_bytes(int stages) { return STAGES + stages * STAGE_BYTES; }
    // The output column of the first row of the warp's tile `c`, or of its pair.
    static __device__ int first_row(int c) { return (threadIdx.x / 32 * WEIGHT_TILES + c) / SUMS * 8; }
};

__device__ __forceinline__ int own_row() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int own_quad() { return threadIdx.x % 4; }

template <typename G> using Sums = float[G::TOKEN_TILES][G::WEIGHT_TILES][4];

template <typename G, typename Action> __device__ __forceinline__ void for_each_sum(const Action& action) {
#pragma unroll
    for (int t = 0; t < G::TOKEN_TILES; ++t)
#pragma unroll
        for (int c = 0; c < G::WEIGHT_TILES; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) action(t, c, i);
}

__device__ __forceinline__ void write_shared_16(unsigned shared, unsigned x, unsigned y, unsigned z, unsigned w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// What a thread has of the weights of a step: 8 columns of a row of each of the warp's tiles.
template <typename G> struct Held {
    uint4 tiles[G::WEIGHT_TILES];

    // The tensor cores' operand for half a step.
    __device__ uint2 fragment(int c, int half) const {
        return half == 0 ? make_uint2(tiles[c].x, tiles[c].y) : make_uint2(tiles[c].z, tiles[c].w);
    }
};

// The weights of the block's tiles, as one stream of blocks of steps.
template <typename T, typename G> struct Weights {
    const T* weight;
    int rows, columns, tiles, tile, column, end;  // `column`, of the thread, of the next block; `end`: of a tile's blocks
    const T* row[G::WEIGHT_TILES];
    unsigned ring, slot;  // the thread's places in shared memory: the first, and that of the step that is multiplied

    __device__ Weights(const Linear& linear, int tiles, int blocks, unsigned memory)
        : weight(static_cast<const T*>(linear.weight)), rows(linear.rows), columns(linear.columns), tiles(tiles),
          tile(blockIdx.x), end(blocks * BLOCK_STEPS * 32), ring(memory + threadIdx.x * 16), slot(ring) {
        start_tile();
    }
    // Of what lies behind the last row the last one is copied, which is what nobody writes.
    __device__ void start_tile() {
        column = own_quad() * 8;
#pragma unroll
        for (int c = 0; c < G::WEIGHT_TILES; ++c) {
            const int line = min(tile * G::UNIT + G::first_row(c) + own_row(), rows - 1) + c % G::SUMS * rows;
            row[c] = weight + static_cast<size_t>(line) * columns + column;
        }
    }
    // Copies step `d` of the stream's next block, and what the thread copied before, in one group. Behind the last column
    // are zeros.
    __device__ void copy(int d) {
        const bool exists = column + d * 32 < columns;
#ifndef TRY_NO_COPY
#pragma unroll
        for (int c = 0; c < G::WEIGHT_TILES; ++c)
#ifdef TRY_NO_LOADS
            copy_async_16(slot + c * G::THREADS * 16, row[c] + d * 32, false);
#else
            copy_async_16(slot + c * G::THREADS * 16, row[c] + d * 32, exists);
#endif
#endif
        commit_copies();
        slot = slot == ring + (G::DEPTH - 1) * G::SLOT_BYTES ? ring : slot + G::SLOT_BYTES;
        if (d == BLOCK_STEPS - 1) advance();
    }
    // The oldest step, which then lies where the next one is copied to.
    __device__ void read(Held<G>& held) const {
        wait_for_copies<G::DEPTH - 1>();
#ifdef TRY_NO_WLDS
        for (int c = 0; c < G::WEIGHT_TILES; ++c) held.tiles[c] = make_uint4(column, slot, column, slot);
        return;
#endif
#pragma unroll
        for (int c = 0; c < G::WEIGHT_TILES; ++c) held.tiles[c] = read_shared_16(slot + c * G::THREADS * 16);
    }

  private:
    __device__ void advance() {
        column += BLOCK_STEPS * 32;
#pragma unroll
        for (int c = 0; c < G::WEIGHT_TILES; ++c) row[c] += BLOCK_STEPS * 32;
        if (column < end) return;
        tile += gridDim.x;
        if (tile < tiles) start_tile();
        else column = columns, end = 0x7fffffff;  // the stream has ended: nothing exists any more
    }
};

// Activations as they come into shared memory, by chunks, through a ring of stages; their copies are part of the groups of
// weights that follow, and have come when the weights that are multiplied before them have. Chunks follow each other as
// the block's tiles need them; where a tile has no more than the ring has stages, they are copied once. Warps take turns:
// each copies a tile of activations of every TURNS-th step, a thread 16 bytes of two rows, eight apart. A chunk before
// they are multiplied it puts each half of them into the order of the tensor cores' operand: a lane then reads an operand
// at once, from behind its neighbour's.
template <typename T, typename G> struct Activations {
    static constexpr int STEPS = G::CHUNK_STEPS / G::TURNS;  // of a chunk, that are the warp's
    const T* row[2];
    int columns[2];  // that exist of a row
    int column, end;  // of what is copied next; of a tile
    unsigned memory, target, unordered;  // the ring; where the next step is copied to; the next one that is put into order
    int bytes, turn, copies, orders, barriers;  // of the ring; the warp's; steps and chunks that are left
    int ahead;  // chunks that are copied before they are read

    __device__ Activations(const TiledLinear& arguments, unsigned memory, int chunks, int tiles) : memory(memory) {
        const int warp = threadIdx.x / 32, tile = warp % G::TOKEN_TILES, stages = arguments.stages;
        const SelectedRows source{arguments.selected, arguments.tokens};
        const bool stay = chunks <= stages;
        turn = warp < G::TURNS * G::TOKEN_TILES ? warp / G::TOKEN_TILES : -1;
        column = max(turn, 0) * 32 + own_quad() * 8, end = chunks * G::CHUNK_STEPS * 32, bytes = stages * G::STAGE_BYTES;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int b = tile * 16 + half * 8 + own_row();
            const bool exists = b < arguments.linear.batch;
            columns[half] = exists ? arguments.linear.columns : 0;
            row[half] = static_cast<const T*>(arguments.input) + column;
            if (exists) row[half] += static_cast<size_t>(source(b)) * arguments.stride;
        }
        target = memory + (max(turn, 0) * G::TOKEN_TILES + tile) * FRAGMENT_BYTES + threadIdx.x % 32 * 16;
        unordered = target;
        barriers = (stay ? chunks : chunks * tiles) - 1;
        copies = orders = turn < 0 ? 0 : (barriers + 1) * STEPS;
        ahead = min(stay ? chunks : stages - 1, MOST_AHEAD);
    }
    // The next step that is the warp's. Behind the last row and column are zeros.
    __device__ void copy() {
        if (copies == 0) return;
        --copies;
#pragma unroll
        for (int half = 0; half < 2; ++half) copy_async_16(target + half * 512, row[half], column < columns[half]);
        turn_to_next(target);
        const bool last = column + G::TURNS * 32 >= end;
        const int further = last ? G::TURNS * 32 - end : G::TURNS * 32;
        column += further, row[0] += further, row[1] += further;
    }
    __device__ void order() {
        if (orders == 0) return;
        --orders;
        const uint4 low = read_shared_16(unordered), high = read_shared_16(unordered + 512);
        write_shared_16(unordered, low.x, high.x, low.y, high.y);
        write_shared_16(unordered + 512, low.z, high.z, low.w, high.w);
        turn_to_next(unordered);
    }
    __device__ void copy_chunk() {
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) copy();
    }
    __device__ void order_chunk() {
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) order();
        __syncthreads();
    }
    // What is the warp's while step `d` of a block is multiplied: of the next chunk, and of one that comes later.
    __device__ void step(int d) {
        if (d % G::TURNS == turn) order(), copy();
    }
    // Where the thread reads the chunk behind the one at `place`. All threads of the block call it. Behind the last one is
    // some chunk.
    __device__ unsigned next(unsigned place) {
        if (barriers > 0) --barriers, __syncthreads();  // it has been put into order, and the one before has been read
        place += G::STAGE_BYTES;
        return place >= memory + bytes ? place - bytes : place;
    }

  private:
    __device__ void turn_to_next(unsigned& place) const {
        place += G::TURNS * G::STEP_BYTES;
        if (place >= memory + bytes) place -= bytes;
    }
};

// A thread's sums over the groups that have ended, in registers or in shared memory. The last group of a tile is added to
// them where it lies.
template <typename G> struct Total {
    Sums<G> sum = {};
    int groups = 0;

    __device__ explicit Total(char*) {}
    // Adds a group, which then begins anew.
    __device__ void add(Sums<G>& group) {
        ++groups;
        for_each_sum<G>([&](int t, int c, int i) { sum[t][c][i] += group[t][c][i], group[t][c][i] = 0.f; });
    }
    // Adds the groups to the last one of the tile.
    __device__ void finish(Sums<G>& group) {
        groups = 0;
        for_each_sum<G>([&](int t, int c, int i) { group[t][c][i] += sum[t][c][i], sum[t][c][i] = 0.f; });
    }
};

template <typename G> struct SharedTotal {
    float4* sum;  // [SUM_REGISTERS / 4, THREADS], of the thread
    int groups = 0;

    __device__ explicit SharedTotal(char* shared) : sum(reinterpret_cast<float4*>(shared) + threadIdx.x) {}
    __device__ float4& place(int t, int c) const { return sum[(t * G::WEIGHT_TILES + c) * G::THREADS]; }
    __device__ void add(Sums<G>& group) {
        if (groups++ > 0) add_to(group);
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
        if (groups > 0) add_to(group);
        groups = 0;
    }
    __device__ void add_to(Sums<G>& group) const {
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

template <bool, typename First, typename> struct Choose { using type = First; };
template <typename First, typename Second> struct Choose<false, First, Second> { using type = Second; };

// Of a tile of activations, operands for both halves of a step. Products of one sum stand as far apart as they can:
// each waits for the one before.
template <typename T, typename G>
__device__ __forceinline__ void multiply(
    float (&sum)[G::WEIGHT_TILES][4], const uint4 (&rows)[2], const Held<G>& weights, bool begins) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned a0[2] = {rows[half].x, rows[half].y}, a2[2] = {rows[half].z, rows[half].w};
#pragma unroll
        for (int c = 0; c < G::WEIGHT_TILES; ++c) {
            const uint2 b = weights.fragment(c, half);
#ifdef TRY_NO_MMA
            sum[c][0] += __uint_as_float(a0[0] ^ a0[1] ^ a2[0] ^ a2[1] ^ b.x ^ b.y);
#else
            if (half == 0) multiply_add(sum[c], a0, a2, b.x, b.y, begins, T());
            else multiply_add(sum[c], a0, a2, b.x, b.y, T());
#endif
        }
    }
}

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
                        for (int s = 0; s < G::SUMS; ++s) {
                            sums[s] = make_float2(total[t][c + s][2 * half], total[t][c + s][2 * half + 1]);
                            if (bias == nullptr) continue;
                            const float2 added = read_two(bias + s * rows + n, n, rows);
                            sums[s].x += added.x, sums[s].y += added.y;
                        }
                        output.two(b, n, rows, sums, own);
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
    Weights<T, G> weights(linear, tiles, blocks, memory);
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
    activations.order_chunk();
    uint4 rows[2][2];  // what is multiplied, and what is read meanwhile
    const auto read = [&](unsigned fragment, uint4 (&target)[2]) {
#ifdef TRY_NO_ALDS
        target[0] = target[1] = make_uint4(fragment, fragment, fragment, fragment);
#else
        target[0] = read_shared_16(fragment);
        target[1] = read_shared_16(fragment + 512);
#endif
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
#ifndef TRY_NO_X
                activations.step(d);
#endif
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
#ifdef TRY_NO_SLICE
                continue;
#endif
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
#ifdef TRY_NO_EPILOGUE
        if (group[0][0][0] == 1.2345f)
#endif
        write<T, G>(group, static_cast<const T*>(linear.bias), output, tile * G::UNIT, linear.batch, linear.rows);
    }
}

#define DIRECT_KERNEL(NAME)                                                                                            \
    template <typename T, int TOKEN_TILES, int WEIGHT_TILES, int WARPS, int DEPTH, int CHUNK_STEPS, int EVERY>         \
    __global__ void __launch_bounds__(32 * WARPS, 1) NAME(const __grid_constant__ TiledLinear arguments)

// output = scale (input weight^T + bias)
DIRECT_KERNEL(linear) {
    const FloatOutput output{static_cast<float*>(arguments.output), arguments.linear.scale};
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
