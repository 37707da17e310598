// Linear layers of the decode step: a few rows of activations (B <= 8) times a weight matrix [N, K] that is streamed
// once from memory. What limits them is memory, so everything serves to keep loads in flight: each thread holds a ring
// of eight 16-byte loads, issued before the kernel waits for its predecessor.
//
// A block of 16 warps computes units of 8 weight rows (8 gate and 8 up rows); the warps split K, each multiplies its
// slice on the tensor cores and the 16 partial sums are added in a fixed order. The order of every sum depends on K
// alone: a sequence gets the same bits in every batch.
#include "decode_common.cuh"

namespace decode {

constexpr int WARPS = 16;
constexpr int THREADS = 32 * WARPS;
constexpr int RING = 8;
constexpr int UNIT = 8;  // weight rows, and the largest batch

struct Layout {
    int slice;         // activations of one sequence that a warp multiplies
    int row_bytes;     // distance of two sequences in shared memory; 64 modulo 128 avoids bank conflicts
    int slice_bytes;   // distance of two warps' slices
};

// What the ring loads: the steps of a warp through its slice of K, unit after unit.
template <typename T, int TILES> struct Stream {
    const T* weight;
    const T* row;
    int rows, columns, units, steps, column, step, unit;

    __device__ void start_unit() {
        const int line = min(unit * UNIT + static_cast<int>(threadIdx.x % 32) / 4, rows - 1);
        row = weight + static_cast<size_t>(line) * columns + column;
    }
    template <int TILE> __device__ uint4 next() {
        uint4 value = make_uint4(0, 0, 0, 0);
        if (unit < units && column + step * 32 < columns)
            value = load_weight(row + static_cast<size_t>(TILE) * rows * columns + step * 32);
        if (TILE == TILES - 1 && ++step == steps) {
            step = 0;
            unit += gridDim.x;
            start_unit();
        }
        return value;
    }
};

// Shared memory gets the warp's slice of every sequence, in T, normalized where NORM; all warps call it.
template <typename T, bool NORM>
__device__ __forceinline__ void stage_activations(
    char* shared, float* sums, const void* input, bool input_float, const T* norm_weight, float epsilon, int batch,
    int columns, Layout layout) {
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
            if (inside) *reinterpret_cast<uint4*>(target + chunk * 16) = pack8<T>(values);
        }
    }
    __syncwarp();
}

struct FloatOutput {
    float* output;
    __device__ void operator()(size_t index, int, const float (&sum)[1]) const { output[index] = sum[0]; }
};

template <typename T> struct ResidualOutput {
    float* output;
    const void* residual;
    bool residual_float;
    __device__ void operator()(size_t index, int, const float (&sum)[1]) const {
        const float before = residual_float ? __ldcg(static_cast<const float*>(residual) + index)
                                            : to_float(static_cast<const T*>(residual)[index]);
        output[index] = before + sum[0];
    }
};

template <typename T> struct SiluOutput {
    T* output;
    __device__ void operator()(size_t index, int, const float (&sum)[2]) const {
        output[index] = from_float<T>(sum[0] / (1.f + expf(-sum[0])) * sum[1]);
    }
};

// rows: N, or half of it for TILES = 2 (gate rows, then up rows).
template <typename T, int TILES, bool NORM, typename Output>
__device__ __forceinline__ void linear(
    const T* weight, const T* bias, const void* input, bool input_float, const T* norm_weight, float epsilon,
    Output output, int batch, int rows, int columns, int steps, bool stage, const char* prefetch, unsigned prefetch_bytes) {
    extern __shared__ __align__(16) char shared[];
    float* partial = reinterpret_cast<float*>(shared);                          // [2, WARPS, TILES, 64]
    float* sums = partial + 2 * WARPS * TILES * 64;                             // [UNIT, WARPS]
    char* activations = reinterpret_cast<char*>(sums + UNIT * WARPS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4, sequence = lane / 4;
    const Layout layout = {steps * 32, WARPS * steps * 32 * (NORM ? 4 : 2) + 64, steps * 32 * (NORM ? 4 : 2)};

    launch_next_kernel();
    Stream<T, TILES> stream;
    stream.weight = weight, stream.rows = rows, stream.columns = columns, stream.steps = steps;
    stream.units = (rows + UNIT - 1) / UNIT;
    stream.column = warp * layout.slice + quad * 8, stream.step = 0, stream.unit = blockIdx.x;
    stream.start_unit();
    uint4 ring[RING];
#pragma unroll
    for (int i = 0; i < RING; i += TILES) {
        ring[i] = stream.template next<0>();
        if (TILES == 2) ring[i + 1] = stream.template next<TILES - 1>();
    }
    constexpr unsigned CHUNK = 2048;
    for (unsigned offset = (threadIdx.x * gridDim.x + blockIdx.x) * CHUNK; offset < prefetch_bytes;
         offset += gridDim.x * THREADS * CHUNK)
        prefetch_to_l2(prefetch + offset, min(CHUNK, prefetch_bytes - offset));

    wait_for_previous_kernel();
    if (NORM || stage)
        stage_activations<T, NORM>(activations, sums, input, input_float, norm_weight, epsilon, batch, columns, layout);

    const char* staged = activations + sequence * layout.row_bytes + warp * layout.slice_bytes + quad * 16;
    float sum[TILES][2] = {};
    int step = 0, buffer = 0;
    for (int unit = blockIdx.x; unit < stream.units;) {
        uint4 a = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < RING; ++i) {
            if (unit >= stream.units) break;
            constexpr int LAST = TILES - 1;
            const int tile = i % TILES;
            if (tile == 0) {
                a = make_uint4(0, 0, 0, 0);
                if (sequence < batch) {
                    if (NORM || stage)
                        a = *reinterpret_cast<const uint4*>(staged + step * 64);
                    else if (stream.column + step * 32 < columns)
                        a = __ldcg(reinterpret_cast<const uint4*>(
                            static_cast<const T*>(input) + sequence * columns + stream.column + step * 32));
                }
            }
            multiply_add(sum[tile], a.x, a.y, ring[i].x, ring[i].y, T());
            multiply_add(sum[tile], a.z, a.w, ring[i].z, ring[i].w, T());
            ring[i] = tile == LAST ? stream.template next<LAST>() : stream.template next<0>();
            if (tile != LAST || ++step < steps) continue;

            float* mine = partial + (buffer * WARPS + warp) * TILES * 64;
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                if (sequence < batch)
                    *reinterpret_cast<float2*>(mine + t * 64 + sequence * 8 + quad * 2) = make_float2(sum[t][0], sum[t][1]);
                sum[t][0] = sum[t][1] = 0.f;
            }
            __syncthreads();
            if (threadIdx.x < batch * UNIT) {
                const int row = unit * UNIT + threadIdx.x % UNIT, b = threadIdx.x / UNIT;
                float total[TILES] = {};
#pragma unroll 4
                for (int w = 0; w < WARPS; ++w)
#pragma unroll
                    for (int t = 0; t < TILES; ++t)
                        total[t] += partial[((buffer * WARPS + w) * TILES + t) * 64 + threadIdx.x];
                if (row < rows) {
#pragma unroll
                    for (int t = 0; t < TILES; ++t)
                        if (bias != nullptr) total[t] += to_float(bias[t * rows + row]);
                    output(static_cast<size_t>(b) * rows + row, row, total);
                }
            }
            step = 0, buffer ^= 1, unit += gridDim.x;
        }
    }
}

#define DECODE_LINEAR_KERNELS(NAME, T)                                                                                 \
    extern "C" __global__ void __launch_bounds__(decode::THREADS, 2) decode_norm_linear_##NAME(                        \
        const T* weight, const T* bias, const void* input, int input_float, const T* norm_weight, float epsilon,       \
        float* output, int batch, int rows, int columns, int steps, const char* prefetch, unsigned prefetch_bytes) {   \
        decode::linear<T, 1, true>(weight, bias, input, input_float, norm_weight, epsilon,                             \
                                   decode::FloatOutput{output}, batch, rows, columns, steps, true, prefetch,           \
                                   prefetch_bytes);                                                                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(decode::THREADS, 2) decode_norm_gate_up_##NAME(                       \
        const T* weight, const T* bias, const void* input, int input_float, const T* norm_weight, float epsilon,       \
        T* output, int batch, int rows, int columns, int steps, const char* prefetch, unsigned prefetch_bytes) {       \
        decode::linear<T, 2, true>(weight, bias, input, input_float, norm_weight, epsilon,                             \
                                   decode::SiluOutput<T>{output}, batch, rows, columns, steps, true, prefetch,         \
                                   prefetch_bytes);                                                                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(decode::THREADS, 2) decode_linear_residual_##NAME(                    \
        const T* weight, const T* bias, const T* input, const void* residual, int residual_float, float* output,       \
        int batch, int rows, int columns, int steps, int stage, const char* prefetch, unsigned prefetch_bytes) {       \
        decode::linear<T, 1, false>(weight, bias, input, false, nullptr, 0.f,                                          \
                                    decode::ResidualOutput<T>{output, residual, residual_float != 0}, batch, rows,     \
                                    columns, steps, stage, prefetch, prefetch_bytes);                                  \
    }

}  // namespace decode

DECODE_LINEAR_KERNELS(float16, __half)
DECODE_LINEAR_KERNELS(bfloat16, __nv_bfloat16)
