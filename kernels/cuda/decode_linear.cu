// Linear layers of decode and verify steps: a few rows of activations (B <= 8) times a weight matrix [N, K] that is streamed
// once from memory. What limits them is memory, so everything serves to keep loads in flight: each thread copies weights
// asynchronously into a ring of its own in shared memory, and the first ones before the kernel waits for its predecessor.
//
// A block of 16 warps computes units of 8 weight rows (8 gate and 8 up rows); the warps split K, each multiplies its
// slice on the tensor cores and the 16 partial sums are added in a fixed order. The order of every sum depends on K
// alone: a sequence gets the same bits in every batch.
#include "decode_common.cuh"

namespace decode {

constexpr int WARPS = 16;
constexpr int THREADS = 32 * WARPS;
constexpr int UNIT = 8;  // weight rows, and the largest batch
#ifndef DECODE_DEPTH
#define DECODE_DEPTH 4
#endif
constexpr int DEPTH = DECODE_DEPTH;  // 16-byte copies of a thread in flight; two blocks share a multiprocessor

struct Layout {
    int slice;         // activations of one sequence that a warp multiplies
    int row_bytes;     // distance of two sequences in shared memory; 64 modulo 128 avoids bank conflicts
    int slice_bytes;   // distance of two warps' slices
};

// What a thread copies: the steps of its warp through the warp's slice of K, unit after unit.
template <typename T, int TILES> struct Stream {
    static constexpr int STAGES = DEPTH / TILES;
    const T* weight;
    const T* row;
    unsigned ring;  // the thread's place in shared memory
    int rows, columns, steps, column, step, unit;

    __device__ void start_unit() {
        const int line = min(unit * UNIT + static_cast<int>(threadIdx.x % 32) / 4, rows - 1);
        row = weight + static_cast<size_t>(line) * columns + column;
    }
    __device__ unsigned place(int stage, int tile) const { return ring + (stage * TILES + tile) * THREADS * 16; }
    // Where no weights are left, zeros are put into the ring.
    __device__ void copy_next(int stage) {
        const unsigned bytes = unit * UNIT < rows && column + step * 32 < columns ? 16 : 0;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(place(stage, tile)),
                         "l"(row + static_cast<size_t>(tile) * rows * columns + step * 32), "r"(bytes)
                         : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
        if (++step == steps) {
            step = 0;
            unit += gridDim.x;
            start_unit();
        }
    }
    __device__ void wait_for_oldest() const {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
    }
    __device__ uint4 read(int stage, int tile) const {
        uint4 value;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                     : "r"(place(stage, tile))
                     : "memory");
        return value;
    }
};

// Shared memory gets the warp's slice of every sequence, in T, normalized where NORM; all warps call it.
// What was normalized also goes to `features`, where that is not null, its rows `feature_stride` apart.
template <typename T, bool NORM>
__device__ __forceinline__ void stage_activations(
    char* shared, float* sums, const void* input, bool input_float, const T* norm_weight, float epsilon, int batch,
    int columns, Layout layout, T* features, int feature_stride) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int chunks = layout.slice / 8, first = warp * layout.slice;
    for (int b = 0; b < batch; ++b) {
        char* target = shared + b * layout.row_bytes + warp * layout.slice_bytes;
        float squares = 0.f;
        for (int chunk = lane; chunk < chunks; chunk += 32) {
            const int column = first + chunk * 8;
            const size_t index = static_cast<size_t>(b) * columns + column;
            if (!NORM) {
                uint4 packed = make_uint4(0, 0, 0, 0);
                if (column < columns) packed = __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(input) + index));
                *reinterpret_cast<uint4*>(target + chunk * 16) = packed;
            } else {
                float values[8] = {};
                if (column < columns) {
                    if (input_float)
                        load8_float(static_cast<const float*>(input) + index, values);
                    else
                        unpack8<T>(__ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(input) + index)), values);
                }
#pragma unroll
                for (int i = 0; i < 8; ++i) squares = fmaf(values[i], values[i], squares);
                float4* raw = reinterpret_cast<float4*>(target + chunk * 32);
                raw[0] = make_float4(values[0], values[1], values[2], values[3]);
                raw[1] = make_float4(values[4], values[5], values[6], values[7]);
            }
        }
        if (NORM) {
            squares = warp_sum(squares);
            if (lane == 0) sums[b * WARPS + warp] = squares;
        }
    }
    if (!NORM) {
        __syncwarp();
        return;
    }
    __syncthreads();
    for (int b = 0; b < batch; ++b) {
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total += sums[b * WARPS + w];
        const float scale = rsqrtf(total / columns + epsilon);
        char* target = shared + b * layout.row_bytes + warp * layout.slice_bytes;
        for (int begin = 0; begin < chunks; begin += 32) {
            const int chunk = begin + lane, column = first + chunk * 8;
            const bool inside = chunk < chunks;
            float values[8] = {}, weights[8] = {};
            if (inside && column < columns) {
                unpack8<T>(*reinterpret_cast<const uint4*>(norm_weight + column), weights);
                const float4* raw = reinterpret_cast<const float4*>(target + chunk * 32);
                const float4 low = raw[0], high = raw[1];
                values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
                values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] = values[i] * scale * weights[i];
            __syncwarp();  // the packed values take the place of raw ones that other lanes have read by now
            if (inside) {
                const uint4 packed = pack8<T>(values);
                *reinterpret_cast<uint4*>(target + chunk * 16) = packed;
                if (features != nullptr && column < columns)
                    *reinterpret_cast<uint4*>(features + static_cast<size_t>(b) * feature_stride + column) = packed;
            }
        }
    }
    __syncwarp();
}

// What becomes of the sums of one row b of activations and one row n of N weight rows (gate and up rows).
struct FloatOutput {
    float* output;
    __device__ void operator()(int b, int n, int rows, const float (&sum)[1]) const {
        output[static_cast<size_t>(b) * rows + n] = sum[0];
    }
};

// The residual that is added also goes to `features`, where that is not null, its rows `feature_stride` apart.
template <typename T> struct ResidualOutput {
    float* output;
    const void* residual;
    bool residual_float;
    T* features;
    int feature_stride;
    __device__ void operator()(int b, int n, int rows, const float (&sum)[1]) const {
        const size_t index = static_cast<size_t>(b) * rows + n;
        const float before = residual_float ? __ldcg(static_cast<const float*>(residual) + index)
                                            : to_float(__ldcg(static_cast<const T*>(residual) + index));
        if (features != nullptr) features[static_cast<size_t>(b) * feature_stride + n] = from_float<T>(before);
        output[index] = before + sum[0];
    }
};

template <typename T> struct SiluOutput {
    T* output;
    __device__ void operator()(int b, int n, int rows, const float (&sum)[2]) const {
        output[static_cast<size_t>(b) * rows + n] = from_float<T>(sum[0] / (1.f + expf(-sum[0])) * sum[1]);
    }
};

// rows: N, or half of it for TILES = 2 (gate rows, then up rows). next_early: whether the next kernel may start at once,
// or only when the previous one has finished.
template <typename T, int TILES, bool NORM, typename Output>
__device__ __forceinline__ void linear(
    const T* weight, const T* bias, const void* input, bool input_float, const T* norm_weight, float epsilon,
    Output output, int batch, int rows, int columns, int steps, bool stage, bool next_early, T* features = nullptr,
    int feature_stride = 0) {
    extern __shared__ __align__(16) char shared[];
    char* ring = shared;                                                        // [DEPTH, THREADS] of 16 bytes
    float* partial = reinterpret_cast<float*>(ring + DEPTH * THREADS * 16);     // [2, WARPS, TILES, 64]
    float* sums = partial + 2 * WARPS * TILES * 64;                             // [UNIT, WARPS]
    char* activations = reinterpret_cast<char*>(sums + UNIT * WARPS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4, sequence = lane / 4;
    const Layout layout = {steps * 32, WARPS * steps * 32 * (NORM ? 4 : 2) + 64, steps * 32 * (NORM ? 4 : 2)};

    if (next_early) launch_next_kernel();
    using Weights = Stream<T, TILES>;
    Weights stream;
    stream.weight = weight, stream.rows = rows, stream.columns = columns, stream.steps = steps;
    stream.ring = static_cast<unsigned>(__cvta_generic_to_shared(ring)) + threadIdx.x * 16;
    stream.column = warp * layout.slice + quad * 8, stream.step = 0, stream.unit = blockIdx.x;
    stream.start_unit();
#pragma unroll
    for (int stage = 0; stage < Weights::STAGES; ++stage) stream.copy_next(stage);

    wait_for_previous_kernel();
    if (!next_early) launch_next_kernel();
    if (NORM || stage)
        stage_activations<T, NORM>(activations, sums, input, input_float, norm_weight, epsilon, batch, columns, layout,
                                   blockIdx.x == 0 ? features : nullptr, feature_stride);

    const char* staged = activations + sequence * layout.row_bytes + warp * layout.slice_bytes + quad * 16;
    int buffer = 0, slot = 0;
    for (int unit = blockIdx.x; unit * UNIT < rows; unit += gridDim.x) {
        float sum[TILES][2] = {};
#pragma unroll 4
        for (int step = 0; step < steps; ++step) {
            uint4 a = make_uint4(0, 0, 0, 0);
            if (sequence < batch) {
                if (NORM || stage)
                    a = *reinterpret_cast<const uint4*>(staged + step * 64);
                else if (stream.column + step * 32 < columns)
                    a = __ldcg(reinterpret_cast<const uint4*>(
                        static_cast<const T*>(input) + sequence * columns + stream.column + step * 32));
            }
            stream.wait_for_oldest();
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const uint4 b = stream.read(slot, tile);
                multiply_add(sum[tile], a.x, a.y, b.x, b.y, T());
                multiply_add(sum[tile], a.z, a.w, b.z, b.w, T());
            }
            stream.copy_next(slot);
            slot = (slot + 1) % Weights::STAGES;
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
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
                    if (bias != nullptr) total[tile] += to_float(bias[tile * rows + row]);
                output(b, row, rows, total);
            }
        }
        buffer ^= 1;  // the next unit's partial sums; this buffer's turn comes after another barrier
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

#define DECODE_LINEAR_KERNELS(NAME, T)                                                                                 \
    extern "C" __global__ void __launch_bounds__(decode::THREADS, 2) decode_norm_linear_##NAME(                        \
        const T* weight, const T* bias, const void* input, int input_float, const T* norm_weight, float epsilon,       \
        float* output, int batch, int rows, int columns, int steps, int next_early, T* features, int feature_stride) { \
        decode::linear<T, 1, true>(weight, bias, input, input_float, norm_weight, epsilon,                             \
                                   decode::FloatOutput{output}, batch, rows, columns, steps, true, next_early != 0,    \
                                   features, feature_stride);                                                          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(decode::THREADS, 2) decode_norm_gate_up_##NAME(                       \
        const T* weight, const T* bias, const void* input, int input_float, const T* norm_weight, float epsilon,       \
        T* output, int batch, int rows, int columns, int steps) {                                                      \
        decode::linear<T, 2, true>(weight, bias, input, input_float, norm_weight, epsilon,                             \
                                   decode::SiluOutput<T>{output}, batch, rows, columns, steps, true, true);            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(decode::THREADS, 2) decode_linear_residual_##NAME(                    \
        const T* weight, const T* bias, const T* input, const void* residual, int residual_float, float* output,       \
        int batch, int rows, int columns, int steps, int stage, T* features, int feature_stride) {                     \
        decode::linear<T, 1, false>(                                                                                   \
            weight, bias, input, false, nullptr, 0.f,                                                                  \
            decode::ResidualOutput<T>{output, residual, residual_float != 0, features, feature_stride}, batch, rows,   \
            columns, steps, stage, true);                                                                              \
    }

}  // namespace decode

DECODE_LINEAR_KERNELS(float16, __half)
DECODE_LINEAR_KERNELS(bfloat16, __nv_bfloat16)
