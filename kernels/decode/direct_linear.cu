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
// the block's tiles need them; where a tile has no more than the ring has stages, they are copied once. The warps take
// turns with the fragments of a chunk: a thread copies 16 bytes of two rows, eight apart, and a chunk before they are
// multiplied puts each half of them into the order of the tensor cores' operand: a lane then reads an operand at once,
// from behind its neighbour's.
template <typename T, typename G> struct Activations {
    static constexpr int FRAGMENTS = G::CHUNK_STEPS * G::TOKEN_TILES;  // of a chunk
    const TiledLinear& arguments;
    const SelectedRows source;
    unsigned memory;
    int chunks, stages;        // of a tile; of the ring
    int copies, orders;        // chunks that are still to be copied, to be put into order
    int chunk = 0;             // of a tile, that is copied next
    int target = 0, stage = 0;  // its stage, and that of the chunk that is read
    int fragment, due = 0;     // the warp's next one of a chunk; those before `due` are dealt with by now

    __device__ Activations(const TiledLinear& arguments, unsigned memory, int chunks, int tiles)
        : arguments(arguments), source{arguments.selected, arguments.tokens}, memory(memory), chunks(chunks),
          stages(arguments.stages), copies(chunks <= stages ? chunks : chunks * tiles), orders(copies - 1),
          fragment(threadIdx.x / 32) {}
    __device__ int ahead() const { return min(chunks <= stages ? chunks : stages - 1, MOST_AHEAD); }
    __device__ unsigned place(int stage, int fragment) const {
        return memory + stage * G::STAGE_BYTES + fragment * FRAGMENT_BYTES + threadIdx.x % 32 * 16;
    }
    // Behind the last row and column are zeros.
    __device__ void copy(int fragment) const {
        const int column = (chunk * G::CHUNK_STEPS + fragment / G::TOKEN_TILES) * 32 + own_quad() * 8;
        const T* input = static_cast<const T*>(arguments.input);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = fragment % G::TOKEN_TILES * 16 + half * 8 + own_row();
            const bool exists = row < arguments.linear.batch && column < arguments.linear.columns;
            const T* from = exists ? input + static_cast<size_t>(source(row)) * arguments.stride + column : input;
            copy_async_16(place(target, fragment) + half * 512, from, exists);
        }
    }
    __device__ void order(int stage, int fragment) const {
        const unsigned own = place(stage, fragment);
        const uint4 low = read_shared_16(own), high = read_shared_16(own + 512);
        write_shared_16(own, low.x, high.x, low.y, high.y);
        write_shared_16(own + 512, low.z, high.z, low.w, high.w);
    }
    // A whole chunk, if there is one.
    __device__ void copy_chunk() {
        if (copies == 0) return;
#pragma unroll 1
        for (int own = fragment; own < FRAGMENTS; own += G::WARPS) copy(own);
        end_copy();
    }
    __device__ void order_chunk() {
#pragma unroll 1
        for (int own = fragment; own < FRAGMENTS; own += G::WARPS) order(0, own);
        __syncthreads();
    }
    // The warp's part of a step: of the next chunk, and of one that comes later.
    __device__ void step() {
        due += G::TOKEN_TILES;
#pragma unroll
        for (int turn = 0; turn < (G::TOKEN_TILES + G::WARPS - 1) / G::WARPS; ++turn) {
            if (fragment >= due) break;
            if (orders > 0) order(following(), fragment);
            if (copies > 0) copy(fragment);
            fragment += G::WARPS;
        }
    }
    // Turns to the next chunk. All threads of the block call it. Behind the last one is some chunk.
    __device__ void advance() {
        if (orders > 0) --orders, __syncthreads();  // it has been put into order by all, and the last one has been read
        if (copies > 0) end_copy();
        stage = following(), fragment = threadIdx.x / 32, due = 0;
    }

  private:
    __device__ int following() const { return stage + 1 == stages ? 0 : stage + 1; }
    __device__ void end_copy() {
        --copies;
        if (++chunk == chunks) chunk = 0;
        if (++target == stages) target = 0;
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
__device__ __forceinline__ void multiply(float (&sum)[G::WEIGHT_TILES][4], const uint4 (&rows)[2], const Held<G>& weights) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned a0[2] = {rows[half].x, rows[half].y}, a2[2] = {rows[half].z, rows[half].w};
#pragma unroll
        for (int c = 0; c < G::WEIGHT_TILES; ++c) {
            const uint2 b = weights.fragment(c, half);
#ifdef TRY_NO_MMA
            sum[c][0] += __uint_as_float(a0[0] ^ a0[1] ^ a2[0] ^ a2[1] ^ b.x ^ b.y);
#else
            multiply_add(sum[c], a0, a2, b.x, b.y, T());
#endif
        }
    }
}

// What becomes of a thread's sums.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void write(
    const Sums<G>& total, const T* bias, const Output& output, int first, int batch, int rows) {
    constexpr int AT_ONCE = 8 / G::WEIGHT_TILES;  // token tiles of which `before` is read before any of them is written
    const auto row = [&](int t, int i) { return t * 16 + i / 2 * 8 + own_row(); };
    const auto column = [&](int c, int i) { return first + G::first_row(c) + own_quad() * 2 + i % 2; };
    const auto exists = [&](int t, int c, int i) { return c % G::SUMS == 0 && row(t, i) < batch && column(c, i) < rows; };
    float before[AT_ONCE][G::WEIGHT_TILES][4];
#pragma unroll
    for (int part = 0; part < G::TOKEN_TILES; part += AT_ONCE) {
        for_each_sum<G>([&](int t, int c, int i) {
            if (t / AT_ONCE * AT_ONCE == part && exists(t, c, i))
                before[t - part][c][i] = output.before(row(t, i), column(c, i), rows);
        });
        for_each_sum<G>([&](int t, int c, int i) {
            if (t / AT_ONCE * AT_ONCE != part || !exists(t, c, i)) return;
            float one[G::SUMS];
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s) {
                one[s] = total[t][c + s][i];
                if (bias != nullptr) one[s] += to_float(bias[s * rows + column(c, i)]);
            }
            output(row(t, i), column(c, i), rows, one, before[t - part][c][i]);
        });
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
    const int ahead = activations.ahead();
    activations.copy_chunk();
    commit_copies();
#pragma unroll
    for (int i = 0; i < G::DEPTH; ++i) {
        if (0 < i && i < ahead) activations.copy_chunk();
        weights.copy(i % BLOCK_STEPS);
    }
    for (int i = G::DEPTH; i < ahead; ++i) activations.copy_chunk();
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
    unsigned place = activations.place(0, 0);
    read(place, rows[0]);
    Held<G> held[2];  // the same of weights
    weights.read(held[0]);
    int block_of_chunk = 0;
    typename Choose<G::LEAVES_TOTAL, SharedTotal<G>, Total<G>>::type total(shared + G::TOTAL);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        Sums<G> sum = {}, group = {};
        int steps_left = linear.steps, slices_left = SLICES_OF_A_GROUP;
        for (int block = 0; block < blocks; ++block) {
#pragma unroll
            for (int d = 0; d < BLOCK_STEPS; ++d) {
                weights.copy((d + G::DEPTH) % BLOCK_STEPS);  // where the step lay that is in registers now
                weights.read(held[(d + 1) % 2]);
#ifndef TRY_NO_X
                activations.step();
#endif
#pragma unroll
                for (int t = 0; t < G::TOKEN_TILES; ++t) {
                    const int turn = d * G::TOKEN_TILES + t;
                    unsigned following = place + (turn + 1) * FRAGMENT_BYTES;
                    if (turn + 1 == BLOCK_STEPS * G::TOKEN_TILES) {
                        if (++block_of_chunk == BLOCKS) {
                            block_of_chunk = 0;
                            activations.advance();
                            following = activations.place(activations.stage, 0);
                        }
                        place = following;
                    }
                    read(following, rows[(turn + 1) % 2]);
                    multiply<T, G>(sum[t], rows[turn % 2], held[d % 2]);
                }
                if ((d + 1) % G::EVERY != 0) continue;
#ifdef TRY_NO_SLICE
                continue;
#endif
                steps_left -= G::EVERY;
                if (steps_left == 0) {
                    steps_left = linear.steps;
                    for_each_sum<G>([&](int t, int c, int i) { group[t][c][i] += sum[t][c][i], sum[t][c][i] = 0.f; });
                    if (--slices_left == 0 && total.groups < GROUPS - 1) slices_left = SLICES_OF_A_GROUP, total.add(group);
                }
            }
        }
        for_each_sum<G>([&](int t, int c, int i) { group[t][c][i] += sum[t][c][i]; });  // of a slice that K ends
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
