// How the blocks of linear.cu walk over units of weight rows, and over those of LoRA adapters' A before them; and what
// each warp has of what adapters add.
#pragma once
#include "decode/activations.cuh"
#include "decode/adapters.cuh"

namespace decode {

constexpr int TILE_ROWS = 8;  // weight rows of one tensor-core instruction

// Leaves a lane's sums of a tile in the block's shared memory, [TILES, HALVES, 8 rows, 8 weight rows].
template <typename G>
__device__ __forceinline__ void leave_sums(float* area, int tile, const float* sums, int batch) {
#pragma unroll
    for (int half = 0; half < G::HALVES; ++half)
        if (own_row() + 8 * half < batch)
            *reinterpret_cast<float2*>(area + (tile * G::HALVES + half) * 64 + own_row() * 8 + own_quad() * 2) =
                make_float2(sums[2 * half], sums[2 * half + 1]);
}

// What a kernel has of adapters: nothing, or the warp's share of what is added to units: that of one tile and one
// place. Rows of B come into shared memory with the unit's weights. Units take two areas, of B and of shares, in turn.
template <typename T, typename G, bool ADAPTED> struct OwnAdapters : NoAdapters {
    __device__ explicit OwnAdapters(const Linear& linear) : NoAdapters(linear.adapters, 0, 0) {}
};
template <typename T, typename G> struct OwnAdapters<T, G, true> : AdaptedRows<T> {
    float* added;  // by each place, in shared memory, twice; the warps' areas of B are behind it
    unsigned areas, scales[G::HALVES], left[G::HALVES][2];  // scales of the lane's rows, as bits
    int known_module;  // whose products are in `left`, where one step of 16 is all of the rank
    bool has_share;
    static_assert(WARPS / G::TILES >= MOST_PLACES, "a warp has one place at most");

    __device__ explicit OwnAdapters(const Linear& linear)
        : AdaptedRows<T>(linear.adapters, linear.batch, linear.rows * G::SUMS), known_module(-1) {
#pragma unroll
        for (int half = 0; half < G::HALVES; ++half) scales[half] = this->scale(own_row() + 8 * half, place());
    }
    __device__ static int tile() { return threadIdx.x / 32 % G::TILES; }
    __device__ static int place() { return threadIdx.x / 32 / G::TILES; }
    __device__ int padded_rank() const { return (this->given.rank + 15) / 16 * 16; }
    __device__ void begin(float* shared) {
        added = shared;
        areas = shared_address(added_in(2)) + threadIdx.x / 32 * 2 * padded_rank() * 16;
        unsigned any = 0;
#pragma unroll
        for (int half = 0; half < G::HALVES; ++half) {
            wait_for_load(scales[half]);
            any |= scales[half];
        }
        has_share = __any_sync(FULL_WARP, (any & 0x7fff) != 0);
        if (has_share || place() >= this->given.places) return;
        const float zeros[2 * G::HALVES] = {};
        leave_share(0, zeros), leave_share(1, zeros);
    }
    __device__ float* added_in(int area) const { return added + area * this->given.places * G::PARTIALS; }
    __device__ void leave_share(int area, const float (&share)[2 * G::HALVES]) const {
        leave_sums<G>(added_in(area) + place() * G::PARTIALS, tile(), share, this->batch);
    }
    // Copies the rows of B of the columns from `column` on into an area, with the thread's next group.
    __device__ void copy_b(int area, int column) const {
        if (!has_share) return;
        const size_t first = place() * this->low_rows() + this->module_of(column) * this->given.rank;
        const T* source = static_cast<const T*>(this->given.b) + first * this->outputs + column;
        for (int rank = threadIdx.x % 32; rank < padded_rank(); rank += 32) {
            const bool exists = rank < this->given.rank && column < this->outputs;
            const T* row = exists ? source + static_cast<size_t>(rank) * this->outputs : source;
            copy_async_16(areas + (area * padded_rank() + rank) * 16, row, exists);
        }
    }
    // Leaves the products of a unit of A's rows that a thread has: of row b of activations and row `place` of each tile.
    // The whole warp calls it.
    __device__ void leave_products(int unit, int b, int place, const float (&total)[G::SUMS]) const {
#pragma unroll
        for (int s = 0; s < G::SUMS; ++s) {
            const float next = __shfl_down_sync(FULL_WARP, total[s], 1);
            const int row = (~unit * G::TILES + s) * TILE_ROWS + place, of = row / this->low_rows();
            this->leave(of, b, row - of * this->low_rows(), this->scale(b, of), total[s], next);
        }
    }
    // What all places add to an output, whose sums stand at `own`.
    __device__ float of_all(int area, int own) const {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < MOST_PLACES; ++i)
            if (i < this->given.places) sum += added_in(area)[i * G::PARTIALS + own];
        return sum;
    }
    // Leaves what the warp adds to the columns from `column` on.
    __device__ void add_share(int area, int column) {
        float sum[2 * G::HALVES] = {};
        const int pair = threadIdx.x % 8 / 2, second = threadIdx.x % 16 / 8;  // as `rank_of_lane` has it
        const unsigned own = areas + (area * padded_rank() + pair * 4 + second * 2 + threadIdx.x % 2) * 16;
        const int module = this->module_of(column);
        bool taken_by[G::HALVES];
#pragma unroll
        for (int half = 0; half < G::HALVES; ++half) taken_by[half] = (scales[half] & 0x7fff) != 0;
#pragma unroll 1
        for (int k = 0; k < this->given.rank; k += 16) {
            if (this->given.rank > 16 || module != known_module)
                while (!__all_sync(FULL_WARP, this->read_low(left, taken_by, place(), module, own_row(), k))) continue;
            unsigned first, second;
            asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                         : "=r"(first), "=r"(second)
                         : "r"(own + k * 16)
                         : "memory");
            this->template multiply<G::HALVES>(sum, left, first, second);
        }
        known_module = module;
        leave_share(area, sum);
    }
};

// What a thread copies: the steps of its warp through the warp's slice of K, unit after unit. A unit is known by its first
// output; with adapters, those of the rows of A, of all places, by -1 and below. The blocks that multiply them have the
// fewest other units.
template <typename T, typename G, bool ADAPTED> struct Weights {
    OwnAdapters<T, G, ADAPTED> adapters;
    const T* weight;
    const T* row[G::TILES];
    unsigned ring;  // the thread's place in shared memory
    int rows, columns, steps, column, step, unit;
    int own_steps;  // in which the columns exist that the thread copies
    // Lanes beside each other copy a row's columns of a stage, and such a copy's lanes so many rows.
    static constexpr int LANES = 4 * G::AT_ONCE, ROWS = TILE_ROWS / G::AT_ONCE;
    static_assert(G::AT_ONCE == 1 || (!ADAPTED && G::UNIT == TILE_ROWS), "others have steps of their own");

    __device__ Weights(const Linear& linear, char* shared)
        : adapters(linear), weight(static_cast<const T*>(linear.weight)),
          ring(in_register(shared_address(shared) + threadIdx.x * 16)), rows(linear.rows), columns(linear.columns),
          steps(linear.steps), column(own_column(linear.steps) + own_later() * 32), step(0), unit(first_unit()),
          own_steps(in_register((linear.columns - column + 31) >> 5)) {
        if (G::AT_ONCE > 1) own_steps = min(own_steps, steps - own_later());
        start_unit();
#pragma unroll(ADAPTED ? 1 : G::STAGES)
        for (int stage = 0; stage < G::STAGES; ++stage) {
            if (has_more()) {
                copy(ring + stage * G::TURN);
                advance();
            }
            commit_copies();
        }
    }
    // Makes ready what adapters need, but for what the previous kernel computes.
    __device__ void begin(char* shared) {
        if constexpr (ADAPTED) {
            adapters.begin(reinterpret_cast<float*>(shared));
            copy_b(0, first_own_unit());
        }
    }
    __device__ void copy_b(int area, int own_unit) const {
        adapters.copy_b(area, tile_column(own_unit, adapters.tile()));
    }
    __device__ const Adapters& given() const { return adapters.given; }
    __device__ int first_own_unit() const {
        int number = blockIdx.x;
        if constexpr (ADAPTED) number += blockIdx.x < given().low_blocks ? gridDim.x - given().low_blocks : -given().low_blocks;
        return number * G::UNIT;
    }
    __device__ int first_unit() const {
        if constexpr (ADAPTED)
            if (blockIdx.x < given().low_blocks) return ~blockIdx.x;
        return first_own_unit();
    }
    __device__ int unit_after(int before) const {
        if constexpr (ADAPTED)
            if (__builtin_expect(before < 0, 0)) {
                const int number = ~before + given().low_blocks;
                return number < given().low_units ? ~number : first_own_unit();
            }
        return before + gridDim.x * G::UNIT;
    }
    // The first output column of a tile, in the whole weight.
    __device__ int tile_column(int own_unit, int tile) const {
        return own_unit + tile * (G::PAIRED ? rows : TILE_ROWS);
    }
    __device__ void start_unit() {
        const T* source = weight;
        int first = unit, last = rows - 1, distance = G::PAIRED ? 0 : TILE_ROWS, beyond = G::PAIRED ? rows : 0;
        if constexpr (ADAPTED)
            if (unit < 0) {
                source = static_cast<const T*>(adapters.given.a), first = ~unit * G::TILES * TILE_ROWS;
                last = adapters.all_low_rows() - 1, distance = TILE_ROWS, beyond = 0;
            }
#pragma unroll
        for (int tile = 0; tile < G::TILES; ++tile) {
            const int line = min(first + tile * distance + copied_row(), last) + tile * beyond;
            row[tile] = source + static_cast<size_t>(line) * columns + column;
        }
    }
    // The thread's place in the next stage. Each thread counts for itself: of a place that is a register plus a uniform one,
    // a compiler (NVRTC 13.0, sm_90) has made copies with a cache policy that were illegal instructions.
    __device__ unsigned after(unsigned place) const {
        return place == ring + G::TURNS - G::TURN ? ring : place + G::TURN;
    }
    __device__ bool has_more() const { return unit < rows; }  // the same for all threads of a block
    // The first row of a tile that the lane copies; by how many steps its columns are behind the stage's first ones.
    __device__ static int copied_row() { return threadIdx.x % 32 / LANES; }
    __device__ static int own_later() { return threadIdx.x % LANES / 4; }
    // Behind the last column, and of several steps behind the last row, zeros are put into the ring. place: the thread's, of
    // what it multiplies; what it copies others may.
    __device__ void copy(unsigned place) const {
        if (G::AT_ONCE > 1) place += (copied_row() * 4 + own_quad() - threadIdx.x % 32) * 16 + own_later() * G::STEP;
#pragma unroll
        for (int tile = 0; tile < G::TILES; ++tile)
#pragma unroll
            for (int i = 0; i < G::AT_ONCE; ++i) {
                const bool exists = step < own_steps && (G::AT_ONCE == 1 || unit + copied_row() + i * ROWS < rows);
                const T* from = row[tile] + static_cast<size_t>(i * ROWS) * columns + step * 32;
                copy_async_16(place + tile * THREADS * 16 + i * ROWS * 64, from, exists);
            }
    }
    __device__ void advance() {
        step += G::AT_ONCE;
        if (G::AT_ONCE > 1 ? step >= steps : step == steps) {
            step = 0;
            unit = unit_after(unit);
            start_unit();
        }
    }
};

}  // namespace decode
