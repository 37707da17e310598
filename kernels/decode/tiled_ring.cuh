// How weights and activations of tiled_linear.cu come into shared memory: through a ring of stages, which some warps of the
// block, the producers, fill and the others, the consumers, empty. A stage holds 64 columns of a tile's weight rows, then
// of all rows of activations. Each stage has two barriers in shared memory, full and empty, so that no warp waits for
// the others, and the ring goes on over the borders of tiles.
#pragma once
#include "decode/common.cuh"

namespace decode {
namespace tiled {

constexpr int STAGE_COLUMNS = 64, STAGE_STEPS = STAGE_COLUMNS / 32, ROW_BYTES = STAGE_COLUMNS * 2;
constexpr int CONSUMERS = HOST_TILED_CONSUMERS, PRODUCERS = HOST_TILED_PRODUCERS;  // warps
constexpr int TILED_THREADS = 32 * (CONSUMERS + PRODUCERS), COPIERS = 32 * (PRODUCERS == 0 ? CONSUMERS : PRODUCERS);
constexpr int BARRIER_BYTES = 16;  // of a stage: full, then empty
static_assert(TILED_THREADS == HOST_TILED_THREADS && ROW_BYTES == HOST_ROW_BYTES, "as the host counts them");

// The 16 bytes of a row lie in shared memory where the tensor memory accelerator's swizzling of 128 bytes puts them:
// piece p of row r at p ^ (r % 8). Of eight rows, a lane multiplies the one that `row_of_eight` gives: two neighbours lie four
// rows apart, so that a step of both, which the swizzling puts into different halves, is read without a bank conflict.
__device__ __forceinline__ constexpr int row_of_eight(int index) { return index / 2 + index % 2 * 4; }

// Offset, in eight rows, of the 16 bytes that a lane reads in a step: of row lane / 4, quad lane % 4.
__device__ __forceinline__ unsigned lane_offset(int step) {
    const int row = row_of_eight(threadIdx.x % 32 / 4), quad = threadIdx.x % 4;
    return row * ROW_BYTES + ((step * 4 + quad) ^ row) * 16;
}

// A CUtensorMap.
struct __align__(64) TensorMap {
    unsigned long long opaque[16];
};

// A matrix product's operands. rows: N, or half of it of gate and up. input: rows `stride` elements apart, of which `source`
// says where row b lies.
template <typename T, typename Source> struct Operands {
    const T *weight, *input;
    int stride, batch, rows, columns;
    Source source;
};

__device__ __forceinline__ void start_barrier(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

// Arrives for the thread once all its copies so far have come.
__device__ __forceinline__ void arrive_after_copies(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_for_barrier(unsigned barrier, int parity) {
    unsigned done;
    do {
#if __CUDA_ARCH__ >= 900
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#else
        asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#endif
    } while (done == 0);
}

// Where the producer or a consumer is in the ring.
struct Ring {
    unsigned memory, barriers;  // of the first stage
    int stage_bytes, stages, stage, parity;

    __device__ Ring(char* shared, int stage_bytes, int stages)
        : memory(shared_address(shared)), barriers(memory + stages * stage_bytes), stage_bytes(stage_bytes),
          stages(stages), stage(0), parity(0) {}
    __device__ unsigned full() const { return barriers + stage * BARRIER_BYTES; }
    __device__ unsigned empty() const { return full() + 8; }
    __device__ unsigned place() const { return memory + stage * stage_bytes; }
    // By one thread, before any other of the block uses the ring; `copiers` arrive where a stage is full.
    __device__ void start(int copiers) const {
        for (int i = 0; i < stages; ++i) {
            start_barrier(barriers + i * BARRIER_BYTES, copiers);
            start_barrier(barriers + i * BARRIER_BYTES + 8, CONSUMERS);
        }
    }
    __device__ void advance() {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

// The tiles of a block, and its columns of them: all, or those of a group of slices.
struct Work {
    int tiles, first_column, chunks;  // of STAGE_COLUMNS
    __device__ int count() const { return tiles > blockIdx.x ? (tiles - 1 - blockIdx.x) / gridDim.x + 1 : 0; }
};

// Where the copying of a block's tiles is, chunk after chunk: the ring's stage that is filled next.
struct Place {
    Ring ring;
    Work work;
    int tile, chunk;

    __device__ Place(const Ring& ring, const Work& work) : ring(ring), work(work), tile(blockIdx.x), chunk(0) {
        if (work.chunks == 0) tile = work.tiles;
    }
    __device__ bool exists() const { return tile < work.tiles; }
    __device__ int column() const { return work.first_column + chunk * STAGE_COLUMNS; }
    __device__ void advance() {
        ring.advance();
        if (++chunk == work.chunks) chunk = 0, tile += gridDim.x;
    }
};

// Every copying thread copies 16 bytes of some rows. Of what lies behind the last row the last one is copied, which
// is what nobody reads; behind the last column are zeros.
template <typename T, typename G, typename Source> struct Copies {
    static constexpr int AT_ONCE = COPIERS / 8;  // rows
    static_assert(G::UNIT % AT_ONCE == 0, "a round of copies lies in one part of a stage");
    Place place;
    Operands<T, Source> operands;
    int own_row;
    unsigned own;

    __device__ Copies(const TensorMap*, const TensorMap*, const Operands<T, Source>& operands, const Place& place)
        : place(place), operands(operands) {
        const int thread = threadIdx.x % COPIERS, piece = thread % 8;
        own_row = thread / 8, own = own_row * ROW_BYTES + (piece ^ own_row % 8) * 16;
    }
    __device__ void start(int) const { wait_for_previous_kernel(); }
    // Fills a stage, once it is empty.
    __device__ void next() {
        if (!place.exists()) return;
        wait_for_barrier(place.ring.empty(), place.ring.parity ^ 1);
        const int column = place.column() + threadIdx.x % 8 * 8;
        const bool exists = column < operands.columns;
        const int from = exists ? column : 0;
        const unsigned target = place.ring.place() + own;
        const auto target_of = [&](int row) { return (target + row * ROW_BYTES) ^ (row % 8 * 16); };
#pragma unroll 8
        for (int row = 0; row < G::WEIGHT_ROWS; row += AT_ONCE) {
            const int half = row / G::UNIT;
            const int line = min(place.tile * G::UNIT + row - half * G::UNIT + own_row, operands.rows - 1);
            const T* source = operands.weight + static_cast<size_t>(line + half * operands.rows) * operands.columns;
            copy_async_16(target_of(row), source + from, exists);
        }
#pragma unroll
        for (int row = 0; row < G::ROWS; row += AT_ONCE) {
            if (G::ROWS % AT_ONCE != 0 && row + own_row >= G::ROWS) break;
            const int line = operands.source(min(row + own_row, operands.batch - 1));
            const T* source = operands.input + static_cast<size_t>(line) * operands.stride;
            copy_async_16(target_of(G::WEIGHT_ROWS + row), source + from, exists);
        }
        arrive_after_copies(place.ring.full());
        place.advance();
    }
};

#if __CUDA_ARCH__ >= 900

// The tensor memory accelerator copies whole stages; one thread asks for them.
template <typename T, typename G, typename Source> struct Accelerator {
    const TensorMap *weights, *activations;
    int rows;
    Place place;

    __device__ Accelerator(
        const TensorMap* weight_map, const TensorMap* input_map, const Operands<T, Source>& operands, const Place& place)
        : weights(weight_map), activations(input_map), rows(operands.rows), place(place) {}
    __device__ void copy(unsigned target, const TensorMap* map, int column, int row, unsigned barrier) const {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                target),
            "l"(map), "r"(column), "r"(row), "r"(barrier)
            : "memory");
    }
    __device__ void copy_weights(const Place& at) const {
        const unsigned full = at.ring.full();
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "n"(G::STAGE_BYTES) : "memory");
#pragma unroll
        for (int half = 0; half < G::SUMS; ++half)
            copy(at.ring.place() + half * G::UNIT * ROW_BYTES, weights, at.column(), half * rows + at.tile * G::UNIT, full);
    }
    __device__ void copy_activations(const Place& at) const {
        copy(at.ring.place() + G::WEIGHT_ROWS * ROW_BYTES, activations, at.column(), 0, at.ring.full());
    }
    // The weights of the first stages are copied before the activations are there.
    __device__ void start(int stages) {
        Place early = place;
        if (threadIdx.x % COPIERS == 0)
            for (int i = 0; i < stages && early.exists(); ++i, early.advance()) copy_weights(early);
        wait_for_previous_kernel();
        for (int i = 0; i < stages && place.exists(); ++i, place.advance())
            if (threadIdx.x % COPIERS == 0) copy_activations(place);
    }
    __device__ void next() {
        if (!place.exists() || threadIdx.x % COPIERS != 0) return;
        wait_for_barrier(place.ring.empty(), place.ring.parity ^ 1);
        copy_weights(place);
        copy_activations(place);
        place.advance();
    }
};

#endif

}  // namespace tiled
}  // namespace decode
