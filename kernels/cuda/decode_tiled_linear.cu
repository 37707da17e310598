// Linear layers of 17 to 64 rows of activations, as trees have that are verified: tiles of 64 or 128 weight rows times all
// rows of activations, whose steps of 32 columns stream together through a ring in shared memory.
//
// Every sum has the order of decode_linear.cu: slices of K from zero, four slices a group, then the groups. So a row gets
// the bits of the decode step. Where a matrix has too few tiles to occupy the GPU, a block computes one group of each sum,
// and the block of a tile that finishes last adds the groups.
#include "decode_outputs.cuh"

namespace decode {
namespace tiled {

constexpr int ROW_WARPS = 2, COLUMN_WARPS = 4, THREADS = 32 * ROW_WARPS * COLUMN_WARPS;
constexpr int STEP_BYTES = 64;                       // of a row, in one step
constexpr int ROWS_AT_ONCE = THREADS * 16 / STEP_BYTES;  // that the block copies with 16 bytes a thread
constexpr int GROUPS = SLICES / SLICES_OF_A_GROUP;

// ROW_TILES and COLUMN_TILES: of a warp, 16 rows of activations and 8 weight rows each. PAIRED: every second tile of
// weight rows holds up rows, `rows` below the gate rows in the tile before. SPLITS: blocks that share K.
template <int ROW_TILES_, int COLUMN_TILES_, bool PAIRED_, int SPLITS_, int STAGES_> struct Geometry {
    static constexpr int ROW_TILES = ROW_TILES_, COLUMN_TILES = COLUMN_TILES_, SPLITS = SPLITS_, STAGES = STAGES_;
    static constexpr bool PAIRED = PAIRED_;
    static constexpr int ROWS = ROW_WARPS * ROW_TILES * 16, WEIGHT_ROWS = COLUMN_WARPS * COLUMN_TILES * 8;
    static constexpr int UNIT = PAIRED ? WEIGHT_ROWS / 2 : WEIGHT_ROWS;  // output columns of a block
    static constexpr int SUMS = PAIRED ? 2 : 1;                          // that an output is made of
    static constexpr int STAGE_BYTES = (WEIGHT_ROWS + ROWS) * STEP_BYTES;
    static_assert(WEIGHT_ROWS % ROWS_AT_ONCE == 0 && ROWS <= ROWS_AT_ONCE && (SPLITS == 1 || SPLITS == GROUPS), "");
};

// What a thread copies into the ring: 16 bytes of some weight rows and of one row of activations, every step.
template <typename T, typename G> struct Copies {
    static constexpr int COUNT = G::WEIGHT_ROWS / ROWS_AT_ONCE;
    const T* weight[COUNT];
    const T* activations;
    unsigned ring;
    int columns, column;
    bool weight_exists[COUNT], row_exists;

    __device__ Copies(const T* matrix, const T* input, char* shared, int batch, int rows, int columns, int stride)
        : columns(columns), column(threadIdx.x % 4 * 8) {
        const int own = threadIdx.x / 4;
        ring = static_cast<unsigned>(__cvta_generic_to_shared(shared)) + threadIdx.x * 16;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int place = i * ROWS_AT_ONCE + own;
            const int line = blockIdx.x * G::UNIT + (G::PAIRED ? place / 16 * 8 + place % 8 : place);
            const int up = G::PAIRED && place / 8 % 2 == 1 ? rows : 0;
            weight_exists[i] = line < rows;
            weight[i] = matrix + static_cast<size_t>(min(line, rows - 1) + up) * columns + column;
        }
        row_exists = own < batch;
        activations = input + static_cast<size_t>(row_exists ? own : 0) * stride + column;
    }
    __device__ void copy_weights(int stage, int step) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            copy_async_16(ring + stage * G::STAGE_BYTES + i * ROWS_AT_ONCE * STEP_BYTES, weight[i] + step * 32,
                          weight_exists[i] && column + step * 32 < columns);
    }
    __device__ void copy_activations(int stage, int step) const {
        if (G::ROWS == ROWS_AT_ONCE || threadIdx.x < G::ROWS * 4)
            copy_async_16(ring + stage * G::STAGE_BYTES + G::WEIGHT_ROWS * STEP_BYTES, activations + step * 32,
                          row_exists && column + step * 32 < columns);
    }
};

template <typename G> using Sums = float[G::ROW_TILES][G::COLUMN_TILES][4];

template <typename G, typename Action> __device__ __forceinline__ void for_each_sum(const Action& action) {
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) action(r, c, i);
}

// One step of 32 columns; `weights` and `activations`: of the lane, in the stage's shared memory.
template <typename T, typename G>
__device__ __forceinline__ void multiply(Sums<G>& sum, unsigned weights, unsigned activations) {
    unsigned a[G::ROW_TILES][4][2];
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 values = read_shared_16(activations + (r * 2 + half) * 8 * STEP_BYTES);
            a[r][0][half] = values.x, a[r][1][half] = values.y, a[r][2][half] = values.z, a[r][3][half] = values.w;
        }
#pragma unroll
    for (int c = 0; c < G::COLUMN_TILES; ++c) {
        const uint4 b = read_shared_16(weights + c * 8 * STEP_BYTES);
#pragma unroll
        for (int r = 0; r < G::ROW_TILES; ++r) multiply_add(sum[r][c], a[r][0], a[r][1], b.x, b.y, T());
#pragma unroll
        for (int r = 0; r < G::ROW_TILES; ++r) multiply_add(sum[r][c], a[r][2], a[r][3], b.z, b.w, T());
    }
}

// The groups of a tile's sums from all its blocks, in order, for the block that finishes last; the others get false.
// partial: [tiles, SPLITS, ROWS * WEIGHT_ROWS] floats; counters: [tiles], zero before and after.
template <typename G>
__device__ __forceinline__ bool add_groups(Sums<G>& sum, float* partial, unsigned* counters) {
    __shared__ bool last_block;
    constexpr int QUADS = G::ROW_TILES * G::COLUMN_TILES;
    float4* tile = reinterpret_cast<float4*>(partial) + static_cast<size_t>(blockIdx.x) * G::SPLITS * QUADS * THREADS;
    float4* own = tile + blockIdx.y * QUADS * THREADS + threadIdx.x;
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; ++c)
            __stcg(own + (r * G::COLUMN_TILES + c) * THREADS,
                   make_float4(sum[r][c][0], sum[r][c][1], sum[r][c][2], sum[r][c][3]));
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last_block = atomicInc(counters + blockIdx.x, G::SPLITS - 1) == G::SPLITS - 1;
    __syncthreads();
    if (!last_block) return false;
    __threadfence();
    float4 groups[G::SPLITS][QUADS];
#pragma unroll
    for (int split = 0; split < G::SPLITS; ++split)
#pragma unroll
        for (int i = 0; i < QUADS; ++i) groups[split][i] = __ldcg(tile + (split * QUADS + i) * THREADS + threadIdx.x);
    for_each_sum<G>([&](int r, int c, int i) { sum[r][c][i] = 0.f; });
#pragma unroll
    for (int split = 0; split < G::SPLITS; ++split)
#pragma unroll
        for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
            for (int c = 0; c < G::COLUMN_TILES; ++c) {
                const float4 group = groups[split][r * G::COLUMN_TILES + c];
                sum[r][c][0] += group.x, sum[r][c][1] += group.y, sum[r][c][2] += group.z, sum[r][c][3] += group.w;
            }
    return true;
}

// rows: N, or half of it where PAIRED. input: [batch, stride]. Grid (tiles, SPLITS).
template <typename T, typename G, typename Output>
__device__ __forceinline__ void linear(
    const T* weight, const T* bias, const T* input, int stride, const Output& output, float* partial, unsigned* counters,
    int batch, int rows, int columns, int steps) {
    extern __shared__ __align__(16) char shared[];
    float* totals = reinterpret_cast<float*>(shared + G::STAGES * G::STAGE_BYTES) + threadIdx.x;  // [sums, THREADS]
    constexpr int OWN_SLICES = SLICES / G::SPLITS;
    const int warp = threadIdx.x / 32, row_warp = warp / COLUMN_WARPS, column_warp = warp % COLUMN_WARPS;
    const int lane_row = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    const int count = OWN_SLICES * steps, first = blockIdx.y * count;

    launch_next_kernel();
    const Copies<T, G> copies(weight, input, shared, batch, rows, columns, stride);
#pragma unroll
    for (int stage = 0; stage < G::STAGES - 1; ++stage)
        if (stage < count) copies.copy_weights(stage, first + stage);
    commit_copies();
    wait_for_previous_kernel();
#pragma unroll
    for (int stage = 0; stage < G::STAGES - 1; ++stage) {
        if (stage < count) copies.copy_activations(stage, first + stage);
        commit_copies();
    }

    const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(shared)) + lane_row * STEP_BYTES + quad * 16;
    const unsigned weights = base + column_warp * G::COLUMN_TILES * 8 * STEP_BYTES;
    const unsigned activations = base + (G::WEIGHT_ROWS + row_warp * G::ROW_TILES * 16) * STEP_BYTES;
    Sums<G> sum, group = {};
    int stage = 0, next_stage = G::STAGES - 1, step = 0;
    for (int slice = 0; slice < OWN_SLICES; ++slice) {
        for_each_sum<G>([&](int r, int c, int i) { sum[r][c][i] = 0.f; });
        for (int i = 0; i < steps; ++i, ++step) {
            wait_for_copies<G::STAGES - 2>();
            __syncthreads();  // what all copied of this stage has come, and the one before has been read by all
            if (step + G::STAGES - 1 < count) {
                copies.copy_weights(next_stage, first + step + G::STAGES - 1);
                copies.copy_activations(next_stage, first + step + G::STAGES - 1);
            }
            commit_copies();
            multiply<T, G>(sum, weights + stage * G::STAGE_BYTES, activations + stage * G::STAGE_BYTES);
            next_stage = stage;
            stage = stage + 1 == G::STAGES ? 0 : stage + 1;
        }
        for_each_sum<G>([&](int r, int c, int i) { group[r][c][i] += sum[r][c][i]; });
        if (G::SPLITS == 1 && slice % SLICES_OF_A_GROUP == SLICES_OF_A_GROUP - 1)
            for_each_sum<G>([&](int r, int c, int i) {
                float* total = totals + ((r * G::COLUMN_TILES + c) * 4 + i) * THREADS;
                *total = (slice < SLICES_OF_A_GROUP ? 0.f : *total) + group[r][c][i];
                group[r][c][i] = 0.f;
            });
    }
    if (G::SPLITS > 1) {
        if (!add_groups<G>(group, partial, counters)) return;
    } else {
        for_each_sum<G>([&](int r, int c, int i) {
            group[r][c][i] = totals[((r * G::COLUMN_TILES + c) * 4 + i) * THREADS];
        });
    }
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; c += G::SUMS)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int b = (row_warp * G::ROW_TILES + r) * 16 + i / 2 * 8 + lane_row;
                const int tile = (column_warp * G::COLUMN_TILES + c) / G::SUMS;
                const int n = blockIdx.x * G::UNIT + tile * 8 + quad * 2 + i % 2;
                if (b >= batch || n >= rows) continue;
                float total[G::SUMS];
#pragma unroll
                for (int s = 0; s < G::SUMS; ++s)
                    total[s] = group[r][c + s][i] + (bias == nullptr ? 0.f : to_float(bias[s * rows + n]));
                output(b, n, rows, total);
            }
}

// One tile of 128 weight rows a block, and one of 64 whose groups four blocks share.
template <int ROW_TILES> using Whole = Geometry<ROW_TILES, 4, false, 1, ROW_TILES == 1 ? 7 : 5>;
template <int ROW_TILES> using Pairs = Geometry<ROW_TILES, 4, true, 1, ROW_TILES == 1 ? 7 : 5>;
template <int ROW_TILES> using Shared = Geometry<ROW_TILES, 2, false, GROUPS, ROW_TILES == 1 ? 16 : 12>;

}  // namespace tiled
}  // namespace decode

#define DECODE_TILED_KERNEL(NAME) extern "C" __global__ void __launch_bounds__(decode::tiled::THREADS, 2) NAME

#define DECODE_TILED_LINEAR(NAME, T, GEOMETRY)                                                                         \
    DECODE_TILED_KERNEL(NAME)                                                                                          \
    (const T* weight, const T* bias, const T* input, int stride, float* output, float* partial, unsigned* counters,    \
     int batch, int rows, int columns, int steps) {                                                                    \
        decode::tiled::linear<T, decode::tiled::GEOMETRY>(                                                             \
            weight, bias, input, stride, decode::FloatOutput{output}, partial, counters, batch, rows, columns, steps); \
    }

#define DECODE_TILED_GATE_UP(NAME, T, GEOMETRY)                                                                        \
    DECODE_TILED_KERNEL(NAME)                                                                                          \
    (const T* weight, const T* bias, const T* input, int stride, T* output, float* partial, unsigned* counters,        \
     int batch, int rows, int columns, int steps) {                                                                    \
        decode::tiled::linear<T, decode::tiled::GEOMETRY>(                                                             \
            weight, bias, input, stride, decode::SiluOutput<T>{output}, partial, counters, batch, rows, columns,       \
            steps);                                                                                                    \
    }

#define DECODE_TILED_RESIDUAL(NAME, T, GEOMETRY)                                                                       \
    DECODE_TILED_KERNEL(NAME)                                                                                          \
    (const T* weight, const T* bias, const T* input, int stride, const void* residual, int residual_float,             \
     float* output, float* partial, unsigned* counters, int batch, int rows, int columns, int steps, T* features,      \
     int feature_stride) {                                                                                             \
        decode::tiled::linear<T, decode::tiled::GEOMETRY>(                                                             \
            weight, bias, input, stride,                                                                               \
            decode::ResidualOutput<T>{                                                                                 \
                output, residual, residual_float != 0, {nullptr, 0}, features, feature_stride},                        \
            partial, counters, batch, rows, columns, steps);                                                           \
    }

#define DECODE_TILED_KERNELS(NAME, T, ROWS, ROW_TILES)                                                                 \
    DECODE_TILED_LINEAR(decode_tiled_linear_##ROWS##_##NAME, T, Whole<ROW_TILES>)                                      \
    DECODE_TILED_LINEAR(decode_tiled_linear_shared_##ROWS##_##NAME, T, Shared<ROW_TILES>)                              \
    DECODE_TILED_GATE_UP(decode_tiled_gate_up_##ROWS##_##NAME, T, Pairs<ROW_TILES>)                                    \
    DECODE_TILED_RESIDUAL(decode_tiled_residual_shared_##ROWS##_##NAME, T, Shared<ROW_TILES>)

DECODE_TILED_KERNELS(float16, __half, 32, 1)
DECODE_TILED_KERNELS(float16, __half, 64, 2)
DECODE_TILED_KERNELS(bfloat16, __nv_bfloat16, 32, 1)
DECODE_TILED_KERNELS(bfloat16, __nv_bfloat16, 64, 2)
