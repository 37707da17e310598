// The stream of weights. A decode step is as fast as it reads them, so the reading never stops: each thread copies
// asynchronously into a ring of its own in shared memory, `depth` copies of 16 bytes ahead of what it multiplies, across
// layers and while blocks wait for each other.
#pragma once
#include "decode_arguments.cuh"
#include "decode_common.cuh"

namespace decode {

constexpr int UNIT = 8;                  // weight rows that a block multiplies at a time, and the largest batch
constexpr int STEP = 32;                 // columns that a warp multiplies at a time
constexpr int SLOT = THREADS * 16;       // bytes of one copy by all threads

enum Kind { QKV, O, GATE_UP, DOWN, KINDS };

// A unit's columns are split over the warps, `steps` steps each.
__host__ __device__ __forceinline__ int steps_of(int columns) { return (columns + WARPS * STEP - 1) / (WARPS * STEP); }

template <typename T> struct WeightStream {
    const Arguments<T>& arguments;
    const Layer<T>* layers;  // in shared memory
    unsigned ring;           // the thread's first place in shared memory
    unsigned ring_bytes, read_offset, copy_offset;
    const T* weight;
    const T* next;
    size_t tile_stride;  // from a gate row to its up row
    int layer, kind, rows, columns, steps, tiles, column, unit, step, tile;

    __device__ WeightStream(const Arguments<T>& arguments_, const Layer<T>* layers_, char* shared)
        : arguments(arguments_), layers(layers_) {
        ring = static_cast<unsigned>(__cvta_generic_to_shared(shared)) + threadIdx.x * 16;
        ring_bytes = arguments.depth * SLOT, read_offset = 0, copy_offset = 0;
        layer = 0, kind = -1;
        start_matrix();
        for (int i = 0; i < arguments.depth; ++i) copy();
    }

    // The next matrix of which this block has a unit; after the last, `rows` is 0.
    __device__ void start_matrix() {
        do {
            if (++kind == KINDS) kind = QKV, ++layer;
            const int hidden = arguments.hidden_size, size = arguments.head_size;
            if (layer < arguments.num_layers) {
                const Layer<T>& l = layers[layer];
                weight = kind == QKV ? l.qkv : kind == O ? l.o : kind == GATE_UP ? l.gate_up : l.down;
                rows = kind == QKV      ? (arguments.heads + 2 * arguments.kv_heads) * size
                       : kind == GATE_UP ? arguments.intermediate_size
                                         : hidden;
                columns = kind == O ? arguments.heads * size : kind == DOWN ? arguments.intermediate_size : hidden;
            } else if (kind == QKV) {
                weight = arguments.head, rows = arguments.vocab_size, columns = hidden;
            } else {
                rows = 0;
                return;
            }
            unit = blockIdx.x;
        } while (unit * UNIT >= rows);
        tiles = kind == GATE_UP && layer < arguments.num_layers ? 2 : 1;
        tile_stride = static_cast<size_t>(rows) * columns;
        steps = steps_of(columns);
        column = threadIdx.x / 32 * steps * STEP + threadIdx.x % 4 * 8;
        start_unit();
    }
    __device__ void start_unit() {
        const int row = min(unit * UNIT + static_cast<int>(threadIdx.x % 32) / 4, rows - 1);
        next = weight + static_cast<size_t>(row) * columns + column;
        step = 0, tile = 0;
    }
    // Start the next copy into the place that was read last; zeros where a warp's slice ends before its last step.
    __device__ void copy() {
        const unsigned bytes = rows > 0 && column + step * STEP < columns ? 16 : 0;
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(ring + copy_offset), "l"(next),
                     "r"(bytes)
                     : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
        copy_offset += SLOT;
        if (copy_offset == ring_bytes) copy_offset = 0;
        if (rows == 0) return;
        if (tile + 1 < tiles) {
            next += tile_stride, tile = 1;
        } else if (++step < steps) {
            next += STEP;
            if (tile == 1) next -= tile_stride, tile = 0;
        } else {
            unit += gridDim.x;
            if (unit * UNIT < rows)
                start_unit();
            else
                start_matrix();
        }
    }
    template <int PENDING> __device__ static void wait_until() {
        asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
    }
    // The oldest copy's 16 bytes; a new copy takes their place.
    __device__ uint4 read() {
        switch (arguments.depth) {
            case 24: wait_until<23>(); break;
            case 20: wait_until<19>(); break;
            case 16: wait_until<15>(); break;
            case 12: wait_until<11>(); break;
            case 8: wait_until<7>(); break;
            default: wait_until<3>();
        }
        uint4 value;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                     : "r"(ring + read_offset)
                     : "memory");
        read_offset += SLOT;
        if (read_offset == ring_bytes) read_offset = 0;
        return value;
    }
};

}  // namespace decode
