// What LoRA adapters (Hu et al. 2021) add to a linear layer: to each row B (A x) of the adapters that its sequence
// takes.
//
// The rows of A are weight rows like others. The first blocks multiply them before rows of their own, with the same
// order of sums, and leave the products in `low`, rounded to T; every block waits for what it needs of them before it
// writes sums. A word of `low` holds two products, complemented, and 0 until they are there: neither a counter nor a
// fence stands between.
//
// What a row's adapters add is, for each place that is used, the sum over its rank from zero, in steps of 16; those are
// added in the order of places, and then to the layer's sum. Places that a row does not take add zeros, which change no
// bit.
//
// No block waits for ever. Those that multiply A are the first of the grid, no more than there are multiprocessors, so
// all of them are resident whatever else waits; until A is done they wait for nothing but the previous kernel, all of
// whose blocks have started before one of this kernel does.
//
// A launch also clears the `low` of the next launch, whose last readers had finished before this one passed its wait.
#pragma once
#include "decode/common.cuh"

namespace decode {

constexpr int MOST_PLACES = HOST_MOST_PLACES;  // a row's places are bits of a byte

__device__ __forceinline__ uint2 read_relaxed(const unsigned* pointer) {
    uint2 value;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(pointer) : "memory");
    return value;
}

__device__ __forceinline__ void write_relaxed(unsigned* pointer, unsigned value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

// A load that stays where it stands, so that its latency is hidden.
__device__ __forceinline__ unsigned read_early(const void* pointer) {
    unsigned short value;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(value) : "l"(pointer) : "memory");
    return value;
}

// Where a value that was read early is used first, which the compiler would move up to the load.
__device__ __forceinline__ void wait_for_load(unsigned& value) { asm volatile("" : "+r"(value)); }

// The adapters of the rows of a step, of up to 64. A warp that has read the scales has in `taken`, of rows `lane` and
// `lane` + 32, the places with scales other than 0, a byte each, and in `used` those of all rows.
template <typename T> struct AdaptedRows {
    const Adapters& given;
    int batch, outputs;  // rows of activations, and of the whole weight
    unsigned taken, used;

    __device__ AdaptedRows(const Adapters& adapters, int rows, int all_outputs)
        : given(adapters), batch(rows), outputs(all_outputs), taken(0), used(0) {}
    // Brings the scales near, for `read_scales`.
    __device__ void fetch_scales() const {
        for (int row = threadIdx.x % 32; row < batch; row += 32) read_early(scales_of(row));
    }
    __device__ void read_scales() {
#pragma unroll 1
        for (int row = threadIdx.x % 32; row < batch; row += 32) {
            const T* own = scales_of(row);
            float scales[MOST_PLACES];
#pragma unroll
            for (int place = 0; place < MOST_PLACES; ++place)
                scales[place] = place < given.places ? to_float(__ldg(own + place)) : 0.f;
#pragma unroll
            for (int place = 0; place < MOST_PLACES; ++place)
                if (scales[place] != 0.f) taken |= 1u << (row / 32 * MOST_PLACES + place);
        }
        used = __reduce_or_sync(FULL_WARP, (taken | taken >> MOST_PLACES) & ((1u << MOST_PLACES) - 1));
    }
    __device__ const T* scales_of(int row) const {
        return static_cast<const T*>(given.scales) + (given.tokens == 1 ? row : row / given.tokens) * given.places;
    }
    __device__ bool takes(int row, int place) const {  // the whole warp calls it
        return __shfl_sync(FULL_WARP, taken, row % 32) >> (row / 32 * MOST_PLACES + place) & 1;
    }
    __device__ int low_rows() const { return given.modules * given.rank; }  // of A, a place
    __device__ unsigned* low(int place, int row, int p) const {
        return given.low + (static_cast<size_t>(place * batch + row) * low_rows() + p) / 2;
    }
    __device__ int module_of(int column) const { return (column >= given.ends[0]) + (column >= given.ends[1]); }
    __device__ int all_low_rows() const { return given.places * low_rows(); }

    // The row's scale in a place, as bits: of what does not exist 0.
    __device__ unsigned scale(int row, int place) const {
        return row < batch && place < given.places ? read_early(scales_of(row) + place) : 0;
    }
    // Leaves the products of a place's rows `p`, even, and p + 1 of A, times a scale that is not 0.
    __device__ void leave(int place, int row, int p, unsigned scale, float even, float odd) const {
        const float factor = unpack<T>(scale).x;
        if (p % 2 == 0 && factor != 0.f)
            write_relaxed(low(place, row, p), max(~pack<T>(even * factor, odd * factor), 1u));
    }

    // Has the second-level cache fetch what `count` columns need of B; the first `threads` threads of the block call
    // it.
    __device__ void fetch(int first, int count, int threads) const {
        const int end = min(first + count, outputs);
#pragma unroll 1
        for (int i = threadIdx.x; i < given.rank * (count / 16); i += threads) {
            const int column = first + i / given.rank * 16;
            if (column >= end) continue;
            const size_t row = module_of(column) * given.rank + i % given.rank;
#pragma unroll 1
            for (unsigned left = used; left != 0; left &= left - 1) {
                const size_t first = ((__ffs(left) - 1) * low_rows() + row) * outputs + column;
                const T* source = static_cast<const T*>(given.b) + first;
                asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
            }
        }
    }

    // Of 16 ranks from `k` on, the first of the lane's two pairs, in the columns of A's products and the rows of B; the
    // other pair follows it, so that a lane's products lie side by side.
    __device__ static int rank_of_lane(int k) { return k + threadIdx.x % 4 * 4; }

    // What `multiply` takes of B: of 16 ranks from `k` on and column n, which is of `module`.
    __device__ void read_b(unsigned (&right)[2][2], int place, int module, int n, int k) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int rank = rank_of_lane(k) + 2 * i;
            right[i][0] = right[i][1] = 0;
            if (rank >= given.rank || n >= outputs) continue;
            const size_t row = place * low_rows() + module * given.rank + rank;
            const T* source = static_cast<const T*>(given.b) + row * outputs + n;
            right[i][0] = read_early(source), right[i][1] = read_early(source + outputs);
        }
    }

    // The same of the products of rows `row`, + 8, + 16 ...: those that do not take the place have zeros. Returns
    // whether they are there.
    template <int HALVES>
    __device__ bool read_low(
        unsigned (&left)[HALVES][2], const bool (&taken_by)[HALVES], int place, int module, int row, int k) const {
        bool there = true;
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            uint2 words = make_uint2(~0u, ~0u);
            if (taken_by[half] && rank_of_lane(k) < given.rank)
                words = read_relaxed(low(place, row + half * 8, module * given.rank + rank_of_lane(k)));
            left[half][0] = ~words.x, left[half][1] = ~words.y;
            there = there && words.x != 0 && words.y != 0;
        }
        return there;
    }

    // sum += products of 16 ranks, of B as pairs.
    template <int HALVES>
    __device__ static void multiply(
        float (&sum)[2 * HALVES], const unsigned (&left)[HALVES][2], unsigned first, unsigned second) {
        unsigned lower[HALVES], upper[HALVES];
#pragma unroll
        for (int half = 0; half < HALVES; ++half) lower[half] = left[half][0], upper[half] = left[half][1];
        multiply_add(sum, lower, upper, first, second, T());
    }

    // Clears the next launch's `low`: after the wait for the previous kernel, by all threads of the grid.
    __device__ void clear_next() const {
        const int distance = gridDim.x * blockDim.x;
#pragma unroll 1
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < given.next_words; i += distance) given.next_low[i] = 0;
    }
};

// What a kernel without adapters has in place of them.
struct NoAdapters {
    __device__ NoAdapters(const Adapters&, int, int, char* = nullptr) {}
    __device__ void read_scales() const {}
    __device__ void clear_next() const {}
};

}  // namespace decode
