// How weights and activations of tiled_linear.cu come into shared memory: through a ring of stages, which one warp of the
// block, the producer, fills and the others, the consumers, empty. A stage holds 64 columns of a tile's weight rows, then
// of all rows of activations. Each stage has two barriers in shared memory, full and empty, so that no warp waits for
// the others, and the ring goes on over the borders of tiles.
#pragma once
#include "decode/common.cuh"

namespace decode {
namespace tiled {

constexpr int STAGE_COLUMNS = 64, STAGE_STEPS = STAGE_COLUMNS / 32, ROW_BYTES = STAGE_COLUMNS * 2;
constexpr int CONSUMERS = HOST_TILED_CONSUMERS;  // warps
constexpr int TILED_THREADS = 32 * (CONSUMERS + 1);
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

// Every lane of the producer copies 16 bytes of some rows. Of what lies behind the last row the last one is copied, which
// is what nobody reads; behind the last column are zeros.
template <typename T, typename G, typename Source>
__device__ __forceinline__ void produce_by_copies(Ring ring, const Operands<T, Source>& operands, const Work& work) {
    const int lane = threadIdx.x % 32, own_row = lane / 8, own_piece = lane % 8;
    const unsigned own = own_row * ROW_BYTES + (own_piece ^ own_row) * 16;
    wait_for_previous_kernel();
    for (int tile = blockIdx.x; tile < work.tiles; tile += gridDim.x) {
        int column = work.first_column + own_piece * 8;
        for (int chunk = 0; chunk < work.chunks; ++chunk, column += STAGE_COLUMNS, ring.advance()) {
            wait_for_barrier(ring.empty(), ring.parity ^ 1);
            const bool exists = column < operands.columns;
            const int from = exists ? column : 0;
            const unsigned place = ring.place() + own;
            const auto place_of = [&](int row) { return (place + row * ROW_BYTES) ^ (row % 8 * 16); };
#pragma unroll 8
            for (int row = 0; row < G::WEIGHT_ROWS; row += 4) {
                const int half = row / G::UNIT, line = min(tile * G::UNIT + row - half * G::UNIT + own_row, operands.rows - 1);
                const T* source = operands.weight + static_cast<size_t>(line + half * operands.rows) * operands.columns;
                copy_async_16(place_of(row), source + from, exists);
            }
#pragma unroll
            for (int row = 0; row < G::ROWS; row += 4) {
                const int line = operands.source(min(row + own_row, operands.batch - 1));
                const T* source = operands.input + static_cast<size_t>(line) * operands.stride;
                copy_async_16(place_of(G::WEIGHT_ROWS + row), source + from, exists);
            }
            arrive_after_copies(ring.full());
        }
    }
}

#if __CUDA_ARCH__ >= 900

// The tensor memory accelerator copies whole stages; one thread asks for them, for the weights of the first ones before
// the activations are there.
template <typename G> struct Accelerator {
    const TensorMap *weights, *activations;
    int rows;

    __device__ void copy(unsigned place, const TensorMap* map, int column, int row, unsigned barrier) const {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                place),
            "l"(map), "r"(column), "r"(row), "r"(barrier)
            : "memory");
    }
    __device__ void copy_weights(const Ring& ring, int tile, int column) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ring.full()), "n"(G::STAGE_BYTES)
                     : "memory");
#pragma unroll
        for (int half = 0; half < G::SUMS; ++half)
            copy(ring.place() + half * G::UNIT * ROW_BYTES, weights, column, half * rows + tile * G::UNIT, ring.full());
    }
    __device__ void copy_activations(const Ring& ring, int column) const {
        copy(ring.place() + G::WEIGHT_ROWS * ROW_BYTES, activations, column, 0, ring.full());
    }
    __device__ void produce(Ring ring, const Work& work) const {
        const int all = work.count() * work.chunks;
        Ring early = ring;
        int filled = 0, tile = blockIdx.x, chunk = 0;
        const auto next = [&] {
            if (++chunk == work.chunks) chunk = 0, tile += gridDim.x;
        };
        for (; filled < min(all, ring.stages); ++filled, early.advance(), next())
            copy_weights(early, tile, work.first_column + chunk * STAGE_COLUMNS);
        wait_for_previous_kernel();
        for (int i = 0; i < filled; ++i, ring.advance())
            copy_activations(ring, work.first_column + i % work.chunks * STAGE_COLUMNS);
        for (; filled < all; ++filled, ring.advance(), next()) {
            wait_for_barrier(ring.empty(), ring.parity ^ 1);
            copy_weights(ring, tile, work.first_column + chunk * STAGE_COLUMNS);
            copy_activations(ring, work.first_column + chunk * STAGE_COLUMNS);
        }
    }
};

#endif

}  // namespace tiled
}  // namespace decode
