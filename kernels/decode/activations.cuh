// How activations come into shared memory: normalized or as they are, once for all units of weights or in a ring beside
// them.
#pragma once
#include "decode/common.cuh"

namespace decode {

constexpr int WARPS = SLICES;
constexpr int THREADS = 32 * WARPS;
constexpr int EVERY_COLUMN = 0x7fffffff;
constexpr int SUM_STRIDE = WARPS + 1;  // floats between the sums of two rows, against bank conflicts
static_assert(THREADS == HOST_THREADS, "the host launches as many");

// An input as the host passes it: rows of float or T, `stride` elements apart, and the weight of its norm in T, to which
// `offset` is added in float.
struct NormedInput {
    const void *values, *weight;
    float epsilon, offset;
    int stride, is_float;
};
static_assert(sizeof(NormedInput) == HOST_NORMED_INPUT_BYTES, "as the host's structure");

// Of the thread's lane: the row of activations that it multiplies (and the one 8 further), and which 8 of 32 columns.
__device__ __forceinline__ int own_row() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int own_quad() { return threadIdx.x % 4; }
__device__ __forceinline__ int own_column(int steps) { return static_cast<int>(threadIdx.x / 32) * steps * 32 + own_quad() * 8; }

// Activations that were staged once for all units: `address` of the lane's own, one step `step_bytes` from the next.
struct Staged {
    unsigned address;
    int step_bytes;
    __device__ unsigned place(int, int step) const { return address + step * step_bytes; }
    __device__ void copy(int, int) const {}
};

__device__ __forceinline__ Staged staged_for_lane(const char* activations, int batch, int steps) {
    const int offset = (threadIdx.x / 32 * steps * batch + own_row()) * 64 + own_quad() * 16;
    return {shared_address(activations + offset), batch * 64};
}

// Activations that come with the weights, each time anew: of wide matrices they would not fit into shared memory.
template <typename T, int HALVES> struct Streamed {
    const T* row[HALVES];
    unsigned address;
    int stage_bytes, columns, column;
    bool exists[HALVES];
    __device__ unsigned place(int stage, int) const { return address + stage * stage_bytes; }
    __device__ void copy(int stage, int step) const {
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
            if (exists[half])
                copy_async_16(place(stage, step) + half * 512, row[half] + step * 32, column + step * 32 < columns);
    }
};

// One norm, or two of inputs that then stand side by side, each `width` columns wide.
template <typename T, int PARTS> struct NormInputs {
    const void* values[PARTS];
    bool is_float[PARTS];
    const T* weight[PARTS];
    int stride[PARTS];
    float epsilon, offset;
    int width;
    T* kept;  // gets the last input's columns, where it is not null: normalized, or as they were
    int kept_stride;
    bool keeps_raw;

    // What comes before the previous kernel is done, and what stands around the loads of the whole block, see AddedInputs.
    __device__ void prefetch() const {}
    struct Ahead {};
    __device__ Ahead begin(int, int, int) const { return {}; }
    __device__ void end() const {}
    __device__ bool in_last(int column) const { return PARTS == 2 && column >= width; }
    __device__ void load(int row, int column, float (&target)[8], const Ahead& = {}) const {
        const int part = in_last(column) ? PARTS - 1 : 0;
        const size_t index = static_cast<size_t>(row) * (part == 0 ? stride[0] : stride[PARTS - 1]) + column - part * width;
        if (part == 0 ? is_float[0] : is_float[PARTS - 1])
            load8_float(static_cast<const float*>(part == 0 ? values[0] : values[PARTS - 1]) + index, target);
        else
            unpack8<T>(__ldcg(reinterpret_cast<const uint4*>(
                           static_cast<const T*>(part == 0 ? values[0] : values[PARTS - 1]) + index)),
                       target);
    }
    __device__ void keep(int row, int column, const float (&raw)[8], uint4 normalized) const {
        if (PARTS == 2 && column < width) return;
        T* target = kept + static_cast<size_t>(row) * kept_stride + column - (PARTS - 1) * width;
        *reinterpret_cast<uint4*>(target) = keeps_raw ? pack8<T>(raw) : normalized;
    }
    // The norms' factors of 8 columns.
    __device__ void factors_of(const T* weights, float (&factors)[8]) const {
        unpack8<T>(*reinterpret_cast<const uint4*>(weights), factors);
        if (offset != 0.f)
#pragma unroll
            for (int j = 0; j < 8; ++j) factors[j] += offset;
    }
    // The norms' weights to shared memory, by the whole block, as part of the thread's next group of copies.
    __device__ void copy_weights(T* shared, int columns) const {
#pragma unroll 1
        for (int column = threadIdx.x * 8; column < columns; column += THREADS * 8) {
            const bool last = in_last(column);
            copy_async_16(shared_address(shared + column),
                          last ? weight[PARTS - 1] + column - width : weight[0] + column, true);
        }
    }
};

// All rows, normalized, to `activations`; the whole block calls it. `sums` [PARTS, rows, SUM_STRIDE]; `weights` [columns]
// holds the norms' weights when the threads' oldest group of copies has come. As many lanes serve a slice of a row as it has
// chunks of 8 columns, up to 32, so that of few rows few warps have work: warps with nothing to do leave the instructions
// to the others. HELD: so many chunks of a lane stay in registers, more are read twice. Columns before `begin` are not read,
// those and columns from `end` on not written.
template <typename T, int PARTS, int HELD, typename G, typename Inputs>
__device__ __forceinline__ void stage_normalized(
    const Inputs& inputs, const T* weights, float* sums, char* activations, int batch, int columns,
    int steps, int end = EVERY_COLUMN, int begin = 0) {
    constexpr int ROWS = 8 * G::HALVES;
    const int warp = __shfl_sync(FULL_WARP, static_cast<int>(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
    const int chunks = steps * 4, lane_bits = chunks > 16 ? 5 : chunks > 8 ? 4 : 3;
    const int slice = (threadIdx.x >> lane_bits) % SLICES, own_chunk = lane & ((1 << lane_bits) - 1);
    // A warp's items: all chunks of a slice, as many at a time as it has lanes, then those of its next row.
    struct Item {
        int row, group;
    };
    const Item first{warp >> lane_bits - 1, 0};
    const auto advance = [&](Item& item) {
        item.group += 32;
        if (item.group >= chunks) item.group = 0, item.row += 32 >> lane_bits;
    };
    const int own_first = (slice * chunks + own_chunk) * 8;
    auto ahead = inputs.begin(batch, first.row, own_chunk < chunks && own_first < columns ? own_first : -1);
    float values[HELD][8];
    const auto load = [&](Item item) {
#pragma unroll
        for (int i = 0; i < HELD && item.row < batch; ++i, advance(item)) {
            const int chunk = item.group + own_chunk, column = (slice * chunks + chunk) * 8;
#pragma unroll
            for (int j = 0; j < 8; ++j) values[i][j] = 0.f;
            if (chunk < chunks && column >= begin && column < columns)
                inputs.load(item.row, column, values[i], ahead);
        }
    };
    Item next = first;
    bool all_held = true;
#pragma unroll 1
    while (next.row < batch) {
        load(next);
#pragma unroll
        for (int i = 0; i < HELD && next.row < batch; ++i, advance(next)) {
            const int column = (slice * chunks + next.group + own_chunk) * 8;
            float squares = 0.f;
#pragma unroll
            for (int j = 0; j < 8; ++j) squares = fmaf(values[i][j], values[i][j], squares);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                float sum = PARTS == 1 || inputs.in_last(column) == (part == 1) ? squares : 0.f;
                for (int offset = 1 << lane_bits - 1; offset > 0; offset >>= 1)
                    sum += __shfl_xor_sync(FULL_WARP, sum, offset);
                float* total = sums + (part * ROWS + next.row) * SUM_STRIDE + slice;
                if (own_chunk == 0) *total = next.group == 0 ? sum : *total + sum;
            }
        }
        all_held = all_held && next.row >= batch;
    }
    wait_for_copies<G::STAGES - 1>();
    __syncthreads();
    if (first.row < batch) {
        float factor_of_row[PARTS] = {};  // of row `lane`
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            if (lane >= batch) continue;
            float total = 0.f;
#pragma unroll
            for (int i = 0; i < SLICES; ++i) total += sums[(part * ROWS + lane) * SUM_STRIDE + i];
            factor_of_row[part] = rsqrtf(total / inputs.width + inputs.epsilon);
        }
        next = first;
#pragma unroll 1
        while (next.row < batch) {
            if (!all_held) load(next);
#pragma unroll
            for (int i = 0; i < HELD && next.row < batch; ++i, advance(next)) {
                const int row = next.row, chunk = slice * chunks + next.group + own_chunk, column = chunk * 8;
                float factor = __shfl_sync(FULL_WARP, factor_of_row[0], row);
                if (PARTS == 2) {
                    const float last = __shfl_sync(FULL_WARP, factor_of_row[PARTS - 1], row);
                    if (inputs.in_last(column)) factor = last;
                }
                if (next.group + own_chunk >= chunks || column < begin) continue;
                float factors[8] = {};
                if (column < columns) inputs.factors_of(weights + column, factors);
                float normalized[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) normalized[j] = values[i][j] * factor * factors[j];
                const uint4 packed = pack8<T>(normalized);
                char* target = activations + ((chunk / 4 * batch + row) * 4 + chunk % 4) * 16;
                if (end == EVERY_COLUMN || column < end) *reinterpret_cast<uint4*>(target) = packed;
                if (blockIdx.x == 0 && inputs.kept != nullptr && column < columns) inputs.keep(row, column, values[i], packed);
            }
        }
    }
    __syncthreads();
}

// The same of two inputs of T with little code, which counts where it comes from memory each time: the rows come into
// `activations` as they are, behind the oldest copies of weights, and are normalized there.
template <typename T, typename G>
__device__ __forceinline__ void stage_normalized_in_place(
    const NormInputs<T, 2>& inputs, const T* weights, float* sums, char* activations, int batch, int columns, int steps) {
    constexpr int ROWS = 8 * G::HALVES, AT_ONCE = 4;  // rows whose sums do not wait for each other
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = steps * 4, begin = warp * chunks * 8;
    // Where the chunks of a row lie in the same banks, every other four lanes exchange two rows.
    const int odd = batch % 2 == 0 ? lane / 4 % 2 : 0;
    auto place = [&](int row, int chunk) {
        return activations + (((warp * steps + chunk / 4) * batch + row) * 4 + chunk % 4) * 16;
    };
#pragma unroll 1
    for (int chunk = lane; chunk < chunks; chunk += 32) {
        const int column = begin + chunk * 8;
        const bool last = inputs.in_last(column), exists = column < columns;
        const T* source = static_cast<const T*>(last ? inputs.values[1] : inputs.values[0]) + (exists ? column - last * inputs.width : 0);
#pragma unroll 2
        for (int i = 0; i < batch; ++i) {
            const int row = i ^ odd;
            copy_async_16(shared_address(place(row, chunk)), source + static_cast<size_t>(row) * (last ? inputs.stride[1] : inputs.stride[0]), exists);
        }
    }
    commit_copies();
    if (lane < ROWS) sums[lane * SUM_STRIDE + warp] = 0.f, sums[(ROWS + lane) * SUM_STRIDE + warp] = 0.f;
    wait_for_copies<0>();
    __syncwarp();
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
        if (part == 0 ? begin >= inputs.width : begin + chunks * 8 <= inputs.width) continue;
#pragma unroll 1
        for (int first = 0; first < chunks; first += 32) {
            const int chunk = first + lane;
            const bool adds = chunk < chunks && inputs.in_last(begin + chunk * 8) == (part == 1);
#pragma unroll 1
            for (int row = 0; row < batch; row += AT_ONCE) {
                float sum[AT_ONCE] = {};
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    if (!adds || row + i >= batch) continue;
                    float values[8];
                    unpack8<T>(*reinterpret_cast<const uint4*>(place((row + i) ^ odd, chunk)), values);
#pragma unroll
                    for (int j = 0; j < 8; ++j) sum[i] = fmaf(values[j], values[j], sum[i]);
                }
#pragma unroll
                for (int i = 0; i < AT_ONCE; i += 2) {
                    const float first = odd ? sum[i + 1] : sum[i];
                    sum[i + 1] = odd ? sum[i] : sum[i + 1], sum[i] = first;
                }
#pragma unroll
                for (int offset = 16; offset > 0; offset /= 2)
#pragma unroll
                    for (int i = 0; i < AT_ONCE; ++i) sum[i] += __shfl_xor_sync(FULL_WARP, sum[i], offset);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
                    if (lane == i && row + i < batch) sums[(part * ROWS + row + i) * SUM_STRIDE + warp] += sum[i];
            }
        }
    }
    __syncthreads();
    // Of row `lane`, and of the second input's row in the upper half of the warp.
    float total = 0.f;
    if (lane % 16 < batch)
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total += sums[(lane / 16 * ROWS + lane % 16) * SUM_STRIDE + w];
    const float factor_of_row = rsqrtf(total / inputs.width + inputs.epsilon);
#pragma unroll 1
    for (int first = 0; first < chunks; first += 32) {
        const int chunk = first + lane, column = begin + chunk * 8;
        const bool exists = chunk < chunks && column < columns, last = inputs.in_last(column);
        float factors[8] = {};
        if (exists) inputs.factors_of(weights + column, factors);
#pragma unroll 4
        for (int i = 0; i < batch; ++i) {
            const int row = i ^ odd;
            const float factor = __shfl_sync(FULL_WARP, factor_of_row, row + 16 * last);
            if (!exists) continue;
            uint4* target = reinterpret_cast<uint4*>(place(row, chunk));
            float values[8], normalized[8];
            unpack8<T>(*target, values);
#pragma unroll
            for (int j = 0; j < 8; ++j) normalized[j] = values[j] * factor * factors[j];
            const uint4 packed = pack8<T>(normalized);
            *target = packed;
            if (blockIdx.x == 0 && inputs.kept != nullptr) inputs.keep(row, column, values, packed);
        }
    }
    __syncwarp();
}

// The same of what is multiplied as it is: row `source(b)` of the input. Each warp stages the slice that it multiplies, so
// that none waits for another.
template <typename T, typename Rows>
__device__ __forceinline__ void stage_as_is(
    const T* input, const Rows& source, char* activations, int batch, int columns, int steps) {
    const int chunks = steps * 4, first = threadIdx.x / 32 * chunks;
#pragma unroll 1
    for (int row = 0; row < batch; ++row) {
        const T* own = input + static_cast<size_t>(source(row)) * columns;
#pragma unroll 2
        for (int chunk = first + threadIdx.x % 32; chunk < first + chunks; chunk += 32) {
            uint4 packed = make_uint4(0, 0, 0, 0);
            if (chunk * 8 < columns) packed = __ldcg(reinterpret_cast<const uint4*>(own + chunk * 8));
            *reinterpret_cast<uint4*>(activations + ((chunk / 4 * batch + row) * 4 + chunk % 4) * 16) = packed;
        }
    }
    __syncwarp();
}

// The same of rows of float, or of T, that are rounded to T and may be kept, too.
template <typename T, typename Inputs>
__device__ __forceinline__ void stage_rounded(
    const Inputs& inputs, char* activations, int batch, int columns, int steps) {
    const int chunks = steps * 4, first = threadIdx.x / 32 * chunks, own = first + static_cast<int>(threadIdx.x) % 32;
    auto ahead = inputs.begin(batch, 0, own < first + chunks && own * 8 < columns ? own * 8 : -1);
#pragma unroll 1
    for (int row = 0; row < batch; ++row) {
#pragma unroll 2
        for (int chunk = own; chunk < first + chunks; chunk += 32) {
            uint4 packed = make_uint4(0, 0, 0, 0);
            if (chunk * 8 < columns) {
                float values[8];
                inputs.load(row, chunk * 8, values, ahead);
                packed = pack8<T>(values);
                if (blockIdx.x == 0 && inputs.kept != nullptr) inputs.keep(row, chunk * 8, values, packed);
            }
            *reinterpret_cast<uint4*>(activations + ((chunk / 4 * batch + row) * 4 + chunk % 4) * 16) = packed;
        }
    }
    __syncwarp();
    inputs.end();
}

}  // namespace decode
