// How weights and activations of tiled_linear.cu come into shared memory: through a ring of stages that a block fills
// and empties at once. A stage holds 64 columns of a tile's weight rows, then of all rows of activations; the ring goes
// on over the borders of tiles, so that the next tile's weights come while the sums of the last one are written.
#pragma once
#include "decode/common.cuh"

namespace decode {
namespace tiled {

constexpr int STAGE_COLUMNS = 64, STAGE_STEPS = STAGE_COLUMNS / 32, ROW_BYTES = STAGE_COLUMNS * 2;
constexpr int TILED_WARPS = HOST_TILED_WARPS, TILED_THREADS = 32 * TILED_WARPS;
constexpr int MOST_STAGES = HOST_MOST_STAGES, BARRIER_BYTES = 16;  // of a stage: full, then empty
static_assert(ROW_BYTES == HOST_ROW_BYTES && BARRIER_BYTES == HOST_BARRIER_BYTES, "as the host counts them");

// The 16 bytes of a row lie in shared memory where the tensor memory accelerator's swizzling of 128 bytes puts them:
// piece p of row r at p ^ (r % 8). Of eight rows, a lane multiplies the one that `row_of_eight` gives: two neighbours
// lie four rows apart, so that a step of both, which the swizzling puts into different halves, is read without a bank
// conflict.
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

// A matrix product's operands. rows: N, or half of it of gate and up. input: rows `stride` elements apart, of which
// `source` says where row b lies. low_weight [low_rows, columns]: the rows of adapters' A. The maps tell the tensor
// memory accelerator of weight, input and low_weight.
template <typename T, typename Source> struct Operands {
    const TensorMap *weight_map, *input_map, *low_map;
    const T *weight, *input, *low_weight;
    int stride, batch, rows, columns, low_rows;
    Source source;
};

// The tiles that a block walks over, in chunks of 64 columns: of all of them, or of those of a group of slices.
// `low_tiles` tiles of adapters' A, whose numbers are -1 and below, come before all others: in the blocks that have the
// fewest others, or, where a block has one tile `alone`, in the first ones.
struct Work {
    int tiles, first_column, chunks;
    bool alone;
    int low_tiles;

    __device__ int low_from(int number) const {
        return number < low_tiles ? ~number : alone ? tiles : gridDim.x - 1 - blockIdx.x;
    }
    __device__ int first() const {
        return alone && blockIdx.x >= low_tiles ? blockIdx.x - low_tiles : low_from(blockIdx.x);
    }
    __device__ int after(int tile) const { return tile < 0 ? low_from(~tile + gridDim.x) : tile + gridDim.x; }
};

// A place in the ring, as chunks follow each other; `parity`: of the rounds before it.
struct Ring {
    unsigned memory;  // of the first stage
    int stage_bytes, stages, stage, parity;

    __device__ Ring(char* shared, int stage_bytes, int stages)
        : memory(shared_address(shared)), stage_bytes(stage_bytes), stages(stages), stage(0), parity(0) {}
    __device__ unsigned place() const { return memory + stage * stage_bytes; }
    __device__ unsigned full() const { return memory + stages * stage_bytes + stage * BARRIER_BYTES; }
    __device__ unsigned empty() const { return full() + 8; }
    __device__ void advance() {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

// The chunk that is copied next, and where to.
struct Chunk {
    Ring ring;
    Work work;
    int tile, chunk;

    __device__ Chunk(const Ring& ring, const Work& work)
        : ring(ring), work(work), tile(work.chunks > 0 ? work.first() : work.tiles), chunk(0) {}
    __device__ bool exists() const { return tile < work.tiles; }
    __device__ int column() const { return work.first_column + chunk * STAGE_COLUMNS; }
    __device__ void advance() {
        ring.advance();
        if (++chunk == work.chunks) chunk = 0, tile = work.after(tile);
    }
};

// Every thread copies 16 bytes of some rows, those of a chunk in one group. A barrier of the block for each chunk says
// that it has come, and that the one before has been read: its stage is filled again.
template <typename T, typename G, typename Source> struct Copies {
    static constexpr int AT_ONCE = TILED_THREADS / 8;  // rows
    static_assert(G::UNIT % AT_ONCE == 0, "a round of copies lies in one part of a stage");
    const Operands<T, Source>& operands;
    Chunk next;
    Ring ring;  // what is multiplied next
    int own_row;
    unsigned own;

    __device__ Copies(const Operands<T, Source>& operands, const Ring& ring, const Work& work)
        : operands(operands), next(ring, work), ring(ring) {
        const int piece = threadIdx.x % 8;
        own_row = threadIdx.x / 8, own = own_row * ROW_BYTES + (piece ^ own_row % 8) * 16;
        wait_for_previous_kernel();
        for (int i = 0; i < ring.stages - 1; ++i) copy();
    }
    // Of what lies behind the last row the last one is copied, which is what nobody reads; behind the last column are
    // zeros.
    __device__ void copy() {
        if (next.exists()) {
            const int column = next.column() + threadIdx.x % 8 * 8;
            const bool exists = column < operands.columns;
            const int from = exists ? column : 0;
            const unsigned target = next.ring.place() + own;
#pragma unroll
            for (int row = 0; row < G::WEIGHT_ROWS; row += AT_ONCE) {
                if constexpr (G::ADAPTED)
                    if (next.tile < 0) {
                        const int line = ~next.tile * G::WEIGHT_ROWS + row + own_row;
                        const bool known = line < operands.low_rows;
                        const size_t first = known ? static_cast<size_t>(line) * operands.columns : 0;
                        const T* source = operands.low_weight + first;
                        copy_async_16(target + row * ROW_BYTES, source + from, exists && known);
                        continue;
                    }
                const int half = row / G::UNIT;
                const int line = min(next.tile * G::UNIT + row - half * G::UNIT + own_row, operands.rows - 1);
                const T* source = operands.weight + static_cast<size_t>(line + half * operands.rows) * operands.columns;
                copy_async_16(target + row * ROW_BYTES, source + from, exists);
            }
#pragma unroll
            for (int row = 0; row < G::ROWS; row += AT_ONCE) {
                if (row + own_row >= G::ROWS) break;
                const int line = operands.source(min(row + own_row, operands.batch - 1));
                const T* source = operands.input + static_cast<size_t>(line) * operands.stride;
                copy_async_16(target + (G::WEIGHT_ROWS + row) * ROW_BYTES, source + from, exists);
            }
            next.advance();
        }
        commit_copies();
    }
    // Returns when the next chunk has come. All threads of the block call it.
    __device__ void wait() const {
        wait_for_all_but(ring.stages - 2);
        wait_for_team<TILED_THREADS>(0);
    }
    // Once after each wait.
    __device__ void refill() { copy(); }
    // The chunk has been read by the warp.
    __device__ void release() { ring.advance(); }

  private:
    static __device__ void wait_for_all_but(int groups) {
        switch (groups) {
            case 0: return wait_for_copies<0>();
            case 1: return wait_for_copies<1>();
            case 2: return wait_for_copies<2>();
            case 3: return wait_for_copies<3>();
            case 4: return wait_for_copies<4>();
            case 5: return wait_for_copies<5>();
            default: return wait_for_copies<MOST_STAGES - 2>();
        }
    }
    static_assert(MOST_STAGES == 8, "a case for each");
};

#if __CUDA_ARCH__ >= 900

// The tensor memory accelerator copies whole chunks, for which one thread asks: of each chunk another warp's, since
// asking takes as long as multiplying. Each stage has two barriers in shared memory: one counts the bytes that have
// come, one the warps that have read them, so that warps need not wait for each other.
template <typename T, typename G, typename Source> struct Accelerator {
    const Operands<T, Source>& operands;
    Chunk next;
    Ring ring;
    int asks = 0;  // the warp that asks for the next chunk

    // Copies weights before what the previous kernel computes is there.
    __device__ Accelerator(const Operands<T, Source>& operands, const Ring& ring, const Work& work)
        : operands(operands), next(ring, work), ring(ring) {
        if (threadIdx.x == 0) {
            Ring each = ring;
            for (int i = 0; i < ring.stages; ++i, each.advance()) {
                start_barrier(each.full(), 1);
                start_barrier(each.empty(), TILED_WARPS);
            }
            publish_barriers();
            Chunk early = next;
            for (int i = 0; i < ring.stages - 1 && early.exists(); ++i, early.advance()) copy_weights(early);
        }
        __syncthreads();
        wait_for_previous_kernel();
        for (int i = 0; i < ring.stages - 1 && next.exists(); ++i, next.advance())
            if (threadIdx.x == 0) copy_activations();
    }
    __device__ void wait() const { wait_for_barrier(ring.full(), ring.parity); }
    __device__ void refill() const {}
    // The chunk has been read by the warp. The one before it, which most warps have read, is what is filled again.
    __device__ void release() {
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ring.empty()) : "memory");
        ring.advance();
        if (!next.exists()) return;
        if (threadIdx.x == 32 * asks) {
            wait_for_barrier(next.ring.empty(), next.ring.parity ^ 1);
            copy_weights(next);
            copy_activations();
        }
        next.advance();
        asks = (asks + 1) % TILED_WARPS;
    }

  private:
    static __device__ void copy(unsigned target, const TensorMap* map, int column, int row, unsigned barrier) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3}], [%4];" ::"r"(target),
            "l"(map), "r"(column), "r"(row), "r"(barrier)
            : "memory");
    }
    __device__ void copy_weights(const Chunk& at) const {
        const unsigned full = at.ring.full();
        expect_bytes<G::STAGE_BYTES>(full);
#pragma unroll
        for (int half = 0; half < G::SUMS; ++half) {
            const bool low = G::ADAPTED && at.tile < 0;
            const int row = low ? ~at.tile * G::WEIGHT_ROWS + half * G::UNIT : half * operands.rows + at.tile * G::UNIT;
            const TensorMap* map = low ? operands.low_map : operands.weight_map;
            copy(at.ring.place() + half * G::UNIT * ROW_BYTES, map, at.column(), row, full);
        }
    }
    __device__ void copy_activations() const {
        copy(next.ring.place() + G::WEIGHT_ROWS * ROW_BYTES, operands.input_map, next.column(), 0, next.ring.full());
    }
};

#endif

}  // namespace tiled
}  // namespace decode
