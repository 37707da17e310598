// How weights and activations of tiled_linear.cu come into shared memory: a ring for each team of warps, a stage of
// which holds one or two steps of 32 columns of a tile's weight rows, then of all rows of activations.
#pragma once
#include "decode/common.cuh"

namespace decode {
namespace tiled {

constexpr int STEP_BYTES = 64;  // of a row, in one step
constexpr int MOST_STAGES = HOST_MOST_STAGES;
static_assert(STEP_BYTES == HOST_STEP_BYTES, "the host counts stages of as many");
#if __CUDA_ARCH__ >= 900
constexpr int STAGE_STEPS = 2;  // whole lines of 128 bytes
#else
constexpr int STAGE_STEPS = 1;
#endif
constexpr int ROW_BYTES = STAGE_STEPS * STEP_BYTES;

// Which row of eight in shared memory is multiplied as row `index`. With lines of 128 bytes two neighbours lie four rows
// apart, so that a step of both, which the lines' swizzling puts into different halves, is read without a bank conflict.
__device__ __forceinline__ constexpr int row_of_eight(int index) {
    return STAGE_STEPS == 2 ? index / 2 + index % 2 * 4 : index;
}

// Offset, in eight rows, of the 16 bytes that a lane reads in a step: of row lane / 4, quad lane % 4.
__device__ __forceinline__ unsigned lane_offset(int step) {
    const int row = row_of_eight(threadIdx.x % 32 / 4), quad = threadIdx.x % 4;
    if (STAGE_STEPS == 1) return row * ROW_BYTES + quad * 16;
    return row * ROW_BYTES + ((step * 4 + quad) ^ row) * 16;
}

// A CUtensorMap.
struct __align__(64) TensorMap {
    unsigned long long opaque[16];
};

// A matrix product's operands. rows: N, or half of it of gate and up. input: [batch, stride].
template <typename T> struct Operands {
    const T *weight, *input;
    int stride, batch, rows, columns;
};

#if __CUDA_ARCH__ >= 900

// The tensor memory accelerator copies whole stages, 16 bytes of which it puts into other places of their line by the row;
// one thread of the team asks for them. A barrier in shared memory for each stage counts the bytes that have come.
template <typename T, typename G> struct Ring {
    const TensorMap *weights, *activations;
    unsigned ring, barriers;
    int column, line, rows, stages, parity;
    bool leads;

    __device__ Ring(
        const TensorMap* weight_map, const TensorMap* input_map, const Operands<T>& operands, char* memory,
        char* own_barriers, int first_column, int stages)
        : weights(weight_map), activations(input_map), ring(shared_address(memory)),
          barriers(shared_address(own_barriers)), column(first_column), line(blockIdx.x * G::UNIT), rows(operands.rows),
          stages(stages), parity(0), leads(threadIdx.x % G::TEAM_THREADS == 0) {
        if (leads)
            for (int stage = 0; stage < stages; ++stage)
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + stage * 8) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        __syncthreads();
    }
    __device__ void copy(unsigned place, const TensorMap* map, int step, int row, unsigned barrier) const {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                place),
            "l"(map), "r"(column + step * 32), "r"(row), "r"(barrier)
            : "memory");
    }
    __device__ void copy_weights(int stage, int step) const {
        if (!leads) return;
        const unsigned barrier = barriers + stage * 8;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(G::STAGE_BYTES)
                     : "memory");
#pragma unroll
        for (int half = 0; half < G::SUMS; ++half)
            copy(ring + stage * G::STAGE_BYTES + half * G::UNIT * ROW_BYTES, weights, step, half * rows + line, barrier);
    }
    __device__ void copy_activations(int stage, int step) const {
        const unsigned place = ring + stage * G::STAGE_BYTES + G::WEIGHT_ROWS * ROW_BYTES;
        if (leads) copy(place, activations, step, 0, barriers + stage * 8);
    }
    __device__ void commit() const {}
    // Returns when what was copied of this stage has come; stages are waited for in turn.
    __device__ void wait(int stage) {
        asm volatile(
            "{\n.reg .pred ready;\nagain:\n"
            "mbarrier.try_wait.parity.shared::cta.b64 ready, [%0], %1;\n@!ready bra again;\n}" ::"r"(barriers + stage * 8),
            "r"(parity)
            : "memory");
        if (stage == stages - 1) parity ^= 1;
    }
};

#else

// Every thread of the team copies 16 bytes of some rows, those of a stage in one group.
template <typename T, typename G> struct Ring {
    static constexpr int AT_ONCE = G::TEAM_THREADS / 4;  // rows that the team copies
    const T *weights, *activations;
    unsigned ring;
    int columns, column, stride, batch, rows, own, line, stages;

    __device__ Ring(
        const TensorMap*, const TensorMap*, const Operands<T>& operands, char* memory, char*, int first_column, int stages)
        : columns(operands.columns), stride(operands.stride), batch(operands.batch), rows(operands.rows),
          own(threadIdx.x % G::TEAM_THREADS / 4), line(blockIdx.x * G::UNIT + own), stages(stages) {
        ring = shared_address(memory) + threadIdx.x % G::TEAM_THREADS * 16;
        column = first_column + threadIdx.x % 4 * 8;
        weights = operands.weight + column, activations = operands.input + column;
    }
    // Zeros, where a row does not exist.
    __device__ void copy(unsigned place, const T* source, size_t row, int stride, int step, bool exists) const {
        exists = exists && column + step * 32 < columns;
        copy_async_16(place, exists ? source + row * stride + step * 32 : source, exists);
    }
    __device__ void copy_weights(int stage, int step) const {
#pragma unroll
        for (int i = 0; i < G::WEIGHT_ROWS / AT_ONCE; ++i) {
            const int half = i / (G::UNIT / AT_ONCE), row = line + i * AT_ONCE - half * G::UNIT;
            copy(ring + stage * G::STAGE_BYTES + i * AT_ONCE * ROW_BYTES, weights, row + half * rows, columns, step,
                 row < rows);
        }
    }
    __device__ void copy_activations(int stage, int step) const {
#pragma unroll
        for (int i = 0; i < (G::ROWS + AT_ONCE - 1) / AT_ONCE; ++i) {
            const int row = own + i * AT_ONCE;
            if (row < G::ROWS)
                copy(ring + stage * G::STAGE_BYTES + (G::WEIGHT_ROWS + i * AT_ONCE) * ROW_BYTES, activations, row,
                     stride, step, row < batch);
        }
    }
    __device__ void commit() const { commit_copies(); }
    __device__ void wait(int) const {
        switch (stages) {
            case 2: wait_for_copies<0>(); break;
            case 3: wait_for_copies<1>(); break;
            case 4: wait_for_copies<2>(); break;
            case 5: wait_for_copies<3>(); break;
            case 6: wait_for_copies<4>(); break;
            case 7: wait_for_copies<5>(); break;
            default: wait_for_copies<6>(); break;
        }
    }
};

#endif

}  // namespace tiled
}  // namespace decode
