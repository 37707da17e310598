// Linear layers of the decode step: a few rows of activations (B <= 8) times a weight matrix [N, K].
//
// A block computes units of 8 weight rows (8 gate and 8 up rows); its warps split K, each multiplies its slice on the
// tensor cores, and the partial sums are added in a fixed order. The order of every sum depends on K alone: a sequence
// gets the same bits in every batch.
#pragma once
#include "decode_weights.cuh"

namespace decode {

// Activations in shared memory: a warp's slice of each sequence, which only that warp reads.
struct Slices {
    int slice;        // activations of one sequence that a warp multiplies
    int slice_bytes;  // distance of two warps' slices; normalized ones are first kept in float, in the same place
    int row_bytes;    // distance of two sequences; 64 modulo 128 avoids bank conflicts

    __device__ Slices(int columns, int element_bytes) {
        slice = steps_of(columns) * STEP;
        slice_bytes = slice * element_bytes;
        row_bytes = WARPS * slice_bytes + 64;
    }
};

template <typename T>
__device__ __forceinline__ void stage(char* target, const T* input, int batch, int columns, const Slices& slices) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int b = 0; b < batch; ++b)
        for (int chunk = lane; chunk < slices.slice / 8; chunk += 32) {
            const int column = warp * slices.slice + chunk * 8;
            uint4 packed = make_uint4(0, 0, 0, 0);
            if (column < columns)
                packed = __ldcg(reinterpret_cast<const uint4*>(input + static_cast<size_t>(b) * columns + column));
            *reinterpret_cast<uint4*>(target + b * slices.row_bytes + warp * slices.slice_bytes + chunk * 16) = packed;
        }
    __syncwarp();
}

// The first 8 norm weights of a lane, to be loaded before the block waits for others.
template <typename T> __device__ __forceinline__ uint4 first_norm_weights(const T* norm_weight, int columns) {
    const int slice = steps_of(columns) * STEP, chunk = threadIdx.x % 32;
    const int column = threadIdx.x / 32 * slice + chunk * 8;
    if (chunk >= slice / 8 || column >= columns) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(norm_weight + column);
}

// RMS norm of `hidden` (`embeddings` where hidden is null), the weights of a lane's first chunk given.
template <typename T>
__device__ __forceinline__ void stage_normalized(
    char* target, float* squares, const float* hidden, const T* embeddings, const T* norm_weight, uint4 first_weights,
    float epsilon, int batch, int columns, const Slices& slices) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = slices.slice / 8;
    for (int b = 0; b < batch; ++b) {
        char* place = target + b * slices.row_bytes + warp * slices.slice_bytes;
        float sum = 0.f;
        for (int chunk = lane; chunk < chunks; chunk += 32) {
            const int column = warp * slices.slice + chunk * 8;
            const size_t index = static_cast<size_t>(b) * columns + column;
            float values[8] = {};
            if (column < columns) {
                if (hidden != nullptr)
                    load8_float(hidden + index, values);
                else
                    unpack8<T>(__ldcg(reinterpret_cast<const uint4*>(embeddings + index)), values);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) sum = fmaf(values[i], values[i], sum);
            float4* raw = reinterpret_cast<float4*>(place + chunk * 32);
            raw[0] = make_float4(values[0], values[1], values[2], values[3]);
            raw[1] = make_float4(values[4], values[5], values[6], values[7]);
        }
        sum = warp_sum(sum);
        if (lane == 0) squares[b * WARPS + warp] = sum;
    }
    __syncthreads();
    for (int b = 0; b < batch; ++b) {
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total += squares[b * WARPS + w];
        const float factor = rsqrtf(total / columns + epsilon);
        char* place = target + b * slices.row_bytes + warp * slices.slice_bytes;
        for (int begin = 0; begin < chunks; begin += 32) {
            const int chunk = begin + lane, column = warp * slices.slice + chunk * 8;
            float values[8] = {}, weights[8] = {};
            if (chunk < chunks && column < columns) {
                uint4 packed = first_weights;
                if (begin > 0) packed = *reinterpret_cast<const uint4*>(norm_weight + column);
                unpack8<T>(packed, weights);
                const float4* raw = reinterpret_cast<const float4*>(place + chunk * 32);
                const float4 low = raw[0], high = raw[1];
                values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
                values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] = values[i] * factor * weights[i];
            __syncwarp();  // the packed values take the place of raw ones that other lanes have read by now
            if (chunk < chunks) *reinterpret_cast<uint4*>(place + chunk * 16) = pack8<T>(values);
        }
    }
    __syncwarp();
}

struct FloatOutput {
    float* output;
    __device__ void operator()(size_t index, const float (&sum)[1]) const { output[index] = sum[0]; }
};

// The residual stream is kept in float; before the first layer it is the embeddings.
template <typename T> struct ResidualOutput {
    float* output;
    const T* embeddings;
    __device__ void operator()(size_t index, const float (&sum)[1]) const {
        output[index] = (embeddings == nullptr ? __ldcg(output + index) : to_float(embeddings[index])) + sum[0];
    }
};

template <typename T> struct SiluOutput {
    T* output;
    __device__ void operator()(size_t index, const float (&sum)[2]) const {
        output[index] = from_float<T>(sum[0] / (1.f + expf(-sum[0])) * sum[1]);
    }
};

// Multiply `rows` rows (gate and up rows each, where TILES = 2) with activations that were staged, or with `direct` ones
// in global memory.
template <int TILES, typename T, typename Output>
__device__ __forceinline__ void linear(
    WeightStream<T>& weights, float* partial, const char* staged, const T* direct, const Slices& slices, const T* bias,
    int batch, int rows, int columns, const Output& output) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4, sequence = lane / 4;
    const int steps = steps_of(columns), column = warp * slices.slice + quad * 8;
    staged += sequence * slices.row_bytes + warp * slices.slice_bytes + quad * 16;
    int buffer = 0;
    for (int unit = blockIdx.x; unit * UNIT < rows; unit += gridDim.x) {
        float sum[TILES][2] = {};
#pragma unroll 4
        for (int step = 0; step < steps; ++step) {
            uint4 a = make_uint4(0, 0, 0, 0);
            if (sequence < batch) {
                if (direct == nullptr)
                    a = *reinterpret_cast<const uint4*>(staged + step * STEP * 2);
                else if (column + step * STEP < columns)
                    a = __ldcg(reinterpret_cast<const uint4*>(
                        direct + static_cast<size_t>(sequence) * columns + column + step * STEP));
            }
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const uint4 b = weights.read();
                multiply_add(sum[tile], a.x, a.y, b.x, b.y, T());
                multiply_add(sum[tile], a.z, a.w, b.z, b.w, T());
                weights.copy();
            }
        }
        float* mine = partial + (buffer * WARPS + warp) * TILES * 64;
        if (sequence < batch) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                *reinterpret_cast<float2*>(mine + tile * 64 + sequence * 8 + quad * 2) =
                    make_float2(sum[tile][0], sum[tile][1]);
        }
        __syncthreads();
        if (threadIdx.x < batch * UNIT) {
            const int row = unit * UNIT + threadIdx.x % UNIT, b = threadIdx.x / UNIT;
            float total[TILES] = {};
#pragma unroll
            for (int w = 0; w < WARPS; ++w)
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
                    total[tile] += partial[((buffer * WARPS + w) * TILES + tile) * 64 + threadIdx.x];
            if (row < rows) {
                if (bias != nullptr) {
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile) total[tile] += to_float(bias[tile * rows + row]);
                }
                output(static_cast<size_t>(b) * rows + row, total);
            }
        }
        buffer ^= 1;  // the next unit's partial sums; this buffer's turn comes after another barrier
    }
}

}  // namespace decode
