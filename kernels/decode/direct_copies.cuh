// How weights and activations of direct_linear.cu come into shared memory: weights each thread's own, activations for all.
#pragma once
#include "decode/direct_sums.cuh"

namespace decode {
namespace direct {

constexpr int MOST_AHEAD = 3;   // chunks of activations that are copied before they are read
constexpr int FRAGMENT_BYTES = 1024;  // sixteen rows of activations, a step of columns: twice 16 bytes a lane
static_assert(FRAGMENT_BYTES == HOST_FRAGMENT_BYTES, "as the host counts them");

// A warp's tiles: TOKEN_TILES of 16 rows of activations, WEIGHT_TILES of 8 weight rows. DEPTH steps of weights are under
// way; a chunk of activations has CHUNK_STEPS; slices end every so many steps. PAIRED: every second weight tile is of up
// rows, `rows` below the gate rows of the one before.
template <int TOKEN_TILES_, int WEIGHT_TILES_, int WARPS_, int DEPTH_, int CHUNK_STEPS_, int EVERY_, bool PAIRED_>
struct Geometry {
    static constexpr int TOKEN_TILES = TOKEN_TILES_, WEIGHT_TILES = WEIGHT_TILES_, WARPS = WARPS_, THREADS = 32 * WARPS;
    static constexpr int ROW_TILES = TOKEN_TILES, COLUMN_TILES = WEIGHT_TILES;  // of sums
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
    static_assert(DEPTH <= (MOST_AHEAD - 1) * CHUNK_STEPS, "activations have come when they are read");
    static_assert(WEIGHT_TILES % SUMS == 0, "pairs of tiles");

    static __device__ constexpr int shared_bytes(int stages) { return STAGES + stages * STAGE_BYTES; }
    // The output column of the first row of the warp's tile `c`, or of its pair.
    static __device__ int first_row(int c) { return (threadIdx.x / 32 * WEIGHT_TILES + c) / SUMS * 8; }
};

// The weights of the block's tiles, as one stream of blocks of steps.
template <typename T, typename G> struct Weights {
    const T* weight;
    int rows, columns, tiles, tile, begin, column, end;  // `column`, of the thread, of the next block; others: of a tile's
    const T* row[G::WEIGHT_TILES];
    unsigned ring, slot;  // the thread's places in shared memory: the first, and that of the step that is multiplied

    // Of a tile, blocks of steps from step `begin` to step `end`.
    __device__ Weights(const Linear& linear, int tiles, int begin, int end, unsigned memory)
        : weight(static_cast<const T*>(linear.weight)), rows(linear.rows), columns(linear.columns), tiles(tiles),
          tile(blockIdx.x), begin(begin * 32 + own_quad() * 8), end(end * 32), ring(memory + threadIdx.x * 16), slot(ring) {
        start_tile();
    }
    // Of what lies behind the last row the last one is copied, which is what nobody writes.
    __device__ void start_tile() {
        column = begin;
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
#pragma unroll
        for (int c = 0; c < G::WEIGHT_TILES; ++c)
            copy_async_16(slot + c * G::THREADS * 16, row[c] + d * 32, exists);
        commit_copies();
        slot = following(slot);
        if (d == BLOCK_STEPS - 1) advance();
    }
    __device__ unsigned following(unsigned slot) const {
        return slot == ring + (G::DEPTH - 1) * G::SLOT_BYTES ? ring : slot + G::SLOT_BYTES;
    }
    // The oldest step, which then lies where the next one is copied to.
    __device__ void read(Held<G>& held) const {
        wait_for_copies<G::DEPTH - 1>();
        read_slot<G>(held, slot);
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
// each copies a tile of activations of every TURNS-th step, a thread 16 bytes of two rows, eight apart: what a lane of each
// warp reads.
template <typename T, typename G> struct Activations {
    static constexpr int STEPS = G::CHUNK_STEPS / G::TURNS;  // of a chunk, that are the warp's
    const T* row[2];
    int columns[2];  // that exist of a row
    int column, end;  // of what is copied next; of a tile
    unsigned memory, target;  // the ring; where the next step is copied to
    int bytes, turn, copies, barriers;  // of the ring; the warp's; steps and chunks that are left
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
        barriers = (stay ? chunks : chunks * tiles) - 1;
        copies = turn < 0 ? 0 : (barriers + 1) * STEPS;
        ahead = min(stay ? chunks : stages - 1, MOST_AHEAD);
    }
    // The next step that is the warp's. Behind the last row and column are zeros.
    __device__ void copy() {
        if (copies == 0) return;
        --copies;
#pragma unroll
        for (int half = 0; half < 2; ++half) copy_async_16(target + half * 512, row[half], column < columns[half]);
        target += G::TURNS * G::STEP_BYTES;
        if (target >= memory + bytes) target -= bytes;
        const bool last = column + G::TURNS * 32 >= end;
        const int further = last ? G::TURNS * 32 - end : G::TURNS * 32;
        column += further, row[0] += further, row[1] += further;
    }
    __device__ void copy_chunk() {
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) copy();
    }
    // What is the warp's while step `d` of a block is multiplied: of a chunk that comes later.
    __device__ void step(int d) {
        if (d % G::TURNS == turn) copy();
    }
    // Where the thread reads the chunk behind the one at `place`. All threads of the block call it. Behind the last one is
    // some chunk.
    __device__ unsigned next(unsigned place) {
        if (barriers > 0) --barriers, __syncthreads();  // it has come, and the one before has been read
        place += G::STAGE_BYTES;
        return place >= memory + bytes ? place - bytes : place;
    }
};

}  // namespace direct
}  // namespace decode
