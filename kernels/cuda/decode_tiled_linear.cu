// Linear layers of 17 to 32 rows of activations, as trees have that are verified: tiles of 64 weight rows times all rows of
// activations.
//
// Every sum has the order of decode_linear.cu: slices of K from zero, four slices a group, then the groups. So a row gets
// the bits of the decode step. A block has two teams of four warps; each takes half of K, streams weights and activations
// through a ring of its own and waits for nobody else, so that one multiplies while the other loads. Where a matrix has
// too few tiles to occupy the GPU, a block computes one group of each sum, and the block of a tile that finishes last adds
// the groups.
#include "decode_outputs.cuh"

namespace decode {
namespace tiled {

constexpr int TEAMS = 2, TEAM_WARPS = 4, TEAM_THREADS = 32 * TEAM_WARPS, THREADS = TEAMS * TEAM_THREADS;
constexpr int STAGE_STEPS = 2;                                  // steps of 32 columns in a stage of the ring
constexpr int STEP_BYTES = 64;                                  // of a row, in one step
constexpr int ROWS_AT_ONCE = TEAM_THREADS / (4 * STAGE_STEPS);  // that a team copies with 16 bytes a thread
constexpr int GROUPS = SLICES / SLICES_OF_A_GROUP;
constexpr int PARTS = 4;  // that a block adds in order: the slices of one group, or the groups

// ROW_TILES and COLUMN_TILES: of a warp, 16 rows of activations and 8 weight rows each. PAIRED: every second tile of
// weight rows holds up rows, `rows` below the gate rows in the tile before. SPLITS: blocks that share K.
template <int ROW_WARPS_, int ROW_TILES_, int COLUMN_TILES_, bool PAIRED_, int SPLITS_> struct Geometry {
    static constexpr int ROW_WARPS = ROW_WARPS_, COLUMN_WARPS = TEAM_WARPS / ROW_WARPS;
    static constexpr int ROW_TILES = ROW_TILES_, COLUMN_TILES = COLUMN_TILES_, SPLITS = SPLITS_;
    static constexpr bool PAIRED = PAIRED_;
    static constexpr int ROWS = ROW_WARPS * ROW_TILES * 16, WEIGHT_ROWS = COLUMN_WARPS * COLUMN_TILES * 8;
    static constexpr int UNIT = PAIRED ? WEIGHT_ROWS / 2 : WEIGHT_ROWS;  // output columns of a block
    static constexpr int SUMS = PAIRED ? 2 : 1;                          // that an output is made of
    static constexpr int STEP_SPACE = (WEIGHT_ROWS + ROWS) * STEP_BYTES, STAGE_BYTES = STAGE_STEPS * STEP_SPACE;
    static constexpr int VALUES = ROW_TILES * COLUMN_TILES * 4;  // sums of a thread
    static constexpr int PART_SLICES = SLICES / SPLITS / PARTS;
    static_assert(COLUMN_TILES % (2 * SUMS) == 0 && (SPLITS == 1 || SPLITS == GROUPS), "");
};

// Waits for the threads of the own team.
__device__ __forceinline__ void team_barrier(int team) {
    if (team == 0) asm volatile("bar.sync 1, %0;" ::"n"(TEAM_THREADS) : "memory");
    else asm volatile("bar.sync 2, %0;" ::"n"(TEAM_THREADS) : "memory");
}

// What a thread copies into its team's ring: 16 bytes of some weight rows and of some rows of activations, each stage.
template <typename T, typename G> struct Copies {
    const T *weight, *activations;
    size_t weight_stride, activation_stride;  // from one pass of the team to the next
    unsigned ring;
    int columns, column, rows_left, batch_left;  // of weight rows and activations, counted from the thread's first

    __device__ Copies(
        const T* matrix, const T* input, unsigned team_ring, int first_column, int batch, int rows, int columns,
        int stride)
        : columns(columns) {
        const int thread = threadIdx.x % TEAM_THREADS, own = thread / (4 * STAGE_STEPS);
        const int step = thread / 4 % STAGE_STEPS, quad = thread % 4;
        // Rows change places in twos with the step, so that neighbouring threads write to different banks.
        ring = team_ring + step * G::STEP_SPACE + (own ^ step) * STEP_BYTES + quad * 16;
        column = first_column + step * 32 + quad * 8;
        const int line = blockIdx.x * G::UNIT + (G::PAIRED ? own % 8 : own);
        const bool is_up = G::PAIRED && own / 8 == 1;
        rows_left = rows - line, batch_left = batch - own;
        weight = matrix + static_cast<size_t>(min(line, rows - 1) + (is_up ? rows : 0)) * columns + column;
        activations = input + static_cast<size_t>(min(own, batch - 1)) * stride + column;
        weight_stride = static_cast<size_t>(G::PAIRED ? 8 : ROWS_AT_ONCE) * columns;
        activation_stride = static_cast<size_t>(ROWS_AT_ONCE) * stride;
    }
    __device__ void copy_weights(int stage, int first_step) const {
        const bool inside = column + first_step * 32 < columns;
        const T* source = weight + first_step * 32;
#pragma unroll
        for (int i = 0; i < G::WEIGHT_ROWS / ROWS_AT_ONCE; ++i) {
            const bool exists = inside && i * (G::PAIRED ? 8 : ROWS_AT_ONCE) < rows_left;
            copy_async_16(ring + stage * G::STAGE_BYTES + i * ROWS_AT_ONCE * STEP_BYTES,
                          exists ? source + i * weight_stride : weight, exists);
        }
    }
    __device__ void copy_activations(int stage, int first_step) const {
        const bool inside = column + first_step * 32 < columns;
        const T* source = activations + first_step * 32;
#pragma unroll
        for (int i = 0; i < G::ROWS / ROWS_AT_ONCE; ++i) {
            const bool exists = inside && i * ROWS_AT_ONCE < batch_left;
            copy_async_16(ring + stage * G::STAGE_BYTES + (G::WEIGHT_ROWS + i * ROWS_AT_ONCE) * STEP_BYTES,
                          exists ? source + i * activation_stride : activations, exists);
        }
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
    uint4 b[G::COLUMN_TILES];
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 values = read_shared_16(activations + (r * 2 + half) * 8 * STEP_BYTES);
            a[r][0][half] = values.x, a[r][1][half] = values.y, a[r][2][half] = values.z, a[r][3][half] = values.w;
        }
#pragma unroll
    for (int c = 0; c < G::COLUMN_TILES; ++c) b[c] = read_shared_16(weights + c * 8 * STEP_BYTES);
#pragma unroll
    for (int c = 0; c < G::COLUMN_TILES; ++c)
#pragma unroll
        for (int r = 0; r < G::ROW_TILES; ++r) multiply_add(sum[r][c], a[r][0], a[r][1], b[c].x, b[c].y, T());
#pragma unroll
    for (int c = 0; c < G::COLUMN_TILES; ++c)
#pragma unroll
        for (int r = 0; r < G::ROW_TILES; ++r) multiply_add(sum[r][c], a[r][2], a[r][3], b[c].z, b[c].w, T());
}

// Returns when the oldest of the thread's `stages` - 1 youngest groups of copies has come.
__device__ __forceinline__ void wait_for_stage(int stages) {
    if (stages == 2) wait_for_copies<0>();
    else if (stages == 3) wait_for_copies<1>();
    else wait_for_copies<2>();
}

// The sums of a thread's half of the tiles over all groups, in order, for the block that finishes last; the others get
// false. partial: [tiles, SPLITS, ROWS * WEIGHT_ROWS] floats; counters: [tiles], zero before and after.
template <typename G, int QUADS>
__device__ __forceinline__ bool add_groups(float4 (&sums)[QUADS], float* partial, unsigned* counters) {
    __shared__ bool last_block;
    float4* tile = reinterpret_cast<float4*>(partial) + static_cast<size_t>(blockIdx.x) * G::SPLITS * QUADS * THREADS +
                   threadIdx.x;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) __stcg(tile + (blockIdx.y * QUADS + i) * THREADS, sums[i]);
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
        for (int i = 0; i < QUADS; ++i) groups[split][i] = __ldcg(tile + (split * QUADS + i) * THREADS);
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int split = 0; split < G::SPLITS; ++split) {
            sums[i].x += groups[split][i].x, sums[i].y += groups[split][i].y;
            sums[i].z += groups[split][i].z, sums[i].w += groups[split][i].w;
        }
    }
    return true;
}

// rows: N, or half of it where PAIRED. input: [batch, stride]. stages: 2 to 4. Grid (tiles, SPLITS). Dynamic shared
// memory: the rings [TEAMS, stages, STAGE_BYTES], then a part [TEAMS, VALUES, TEAM_THREADS] floats.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void linear(
    const T* weight, const T* bias, const T* input, int stride, const Output& output, float* partial, unsigned* counters,
    int batch, int rows, int columns, int steps, int stages) {
    extern __shared__ __align__(16) char shared[];
    const int team = threadIdx.x / TEAM_THREADS, thread = threadIdx.x % TEAM_THREADS, warp = thread / 32;
    const int row_warp = warp / G::COLUMN_WARPS, column_warp = warp % G::COLUMN_WARPS;
    const int lane_row = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    const int part_steps = G::PART_SLICES * steps, team_steps = PARTS / TEAMS * part_steps;
    const int team_stages = team_steps / STAGE_STEPS, ring_bytes = stages * G::STAGE_BYTES;
    const int first_column = (static_cast<int>(blockIdx.y) * TEAMS + team) * team_steps * 32;
    char* own_ring = shared + team * ring_bytes;
    float* first_parts = reinterpret_cast<float*>(shared + TEAMS * ring_bytes);  // of each team
    const unsigned ring = static_cast<unsigned>(__cvta_generic_to_shared(own_ring));

    launch_next_kernel();
    const Copies<T, G> copies(weight, input, ring, first_column, batch, rows, columns, stride);
    for (int stage = 0; stage < stages - 1; ++stage)
        if (stage < team_stages) copies.copy_weights(stage, stage * STAGE_STEPS);
    commit_copies();
    wait_for_previous_kernel();
    for (int stage = 0; stage < stages - 1; ++stage) {
        if (stage < team_stages) copies.copy_activations(stage, stage * STAGE_STEPS);
        commit_copies();
    }

    Sums<G> sum = {}, part = {};
    int stage = 0, next_stage = stages - 1, slice_step = 0, slice = 0;
    for (int own_stage = 0; own_stage < team_stages; ++own_stage) {
        wait_for_stage(stages);
        team_barrier(team);  // what all copied of this stage has come, and the one before has been read by all
        if (own_stage + stages - 1 < team_stages) {
            copies.copy_weights(next_stage, (own_stage + stages - 1) * STAGE_STEPS);
            copies.copy_activations(next_stage, (own_stage + stages - 1) * STAGE_STEPS);
        }
        commit_copies();
#pragma unroll
        for (int step = 0; step < STAGE_STEPS; ++step) {
            const unsigned place = (lane_row ^ step) * STEP_BYTES + quad * 16;
            const unsigned lane = ring + stage * G::STAGE_BYTES + step * G::STEP_SPACE + place;
            multiply<T, G>(sum, lane + column_warp * G::COLUMN_TILES * 8 * STEP_BYTES,
                           lane + (G::WEIGHT_ROWS + row_warp * G::ROW_TILES * 16) * STEP_BYTES);
            if (++slice_step < steps) continue;
            slice_step = 0;
            for_each_sum<G>([&](int r, int c, int i) { part[r][c][i] += sum[r][c][i], sum[r][c][i] = 0.f; });
            if (++slice != G::PART_SLICES) continue;
            for_each_sum<G>([&](int r, int c, int i) {
                first_parts[(team * G::VALUES + (r * G::COLUMN_TILES + c) * 4 + i) * TEAM_THREADS + thread] = part[r][c][i];
                part[r][c][i] = 0.f;
            });
        }
        next_stage = stage;
        stage = stage + 1 == stages ? 0 : stage + 1;
    }
    team_barrier(team);  // the ring has been read by all: it takes the second part
    float* second_part = reinterpret_cast<float*>(own_ring);
    for_each_sum<G>([&](int r, int c, int i) {
        second_part[((r * G::COLUMN_TILES + c) * 4 + i) * TEAM_THREADS + thread] = part[r][c][i];
    });
    __syncthreads();

    // Each team finishes one half of the tiles of weight rows.
    constexpr int HALF = G::COLUMN_TILES / 2, QUADS = G::ROW_TILES * HALF;
    float4 sums[QUADS];
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int c = 0; c < HALF; ++c) {
            float total[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int place = ((r * G::COLUMN_TILES + team * HALF + c) * 4 + i) * TEAM_THREADS + thread;
                total[i] = 0.f;
#pragma unroll
                for (int t = 0; t < TEAMS; ++t) {
                    total[i] += first_parts[t * G::VALUES * TEAM_THREADS + place];
                    total[i] += reinterpret_cast<const float*>(shared + t * ring_bytes)[place];
                }
            }
            sums[r * HALF + c] = make_float4(total[0], total[1], total[2], total[3]);
        }
    if (G::SPLITS > 1 && !add_groups<G, QUADS>(sums, partial, counters)) return;
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int c = 0; c < HALF; c += G::SUMS)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int b = (row_warp * G::ROW_TILES + r) * 16 + i / 2 * 8 + lane_row;
                const int tile = (column_warp * G::COLUMN_TILES + team * HALF + c) / G::SUMS;
                const int n = blockIdx.x * G::UNIT + tile * 8 + quad * 2 + i % 2;
                if (b >= batch || n >= rows) continue;
                float total[G::SUMS];
#pragma unroll
                for (int s = 0; s < G::SUMS; ++s) {
                    const float4 four = sums[r * HALF + c + s];
                    total[s] = i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
                    if (bias != nullptr) total[s] += to_float(bias[s * rows + n]);
                }
                output(b, n, rows, total);
            }
}

// Tiles of 64 weight rows; `Shared`: tiles whose groups four blocks compute.
using Whole = Geometry<2, 1, 4, false, 1>;
using Pairs = Geometry<2, 1, 4, true, 1>;
using Shared = Geometry<2, 1, 4, false, GROUPS>;

}  // namespace tiled
}  // namespace decode

#define DECODE_TILED_KERNEL(NAME) extern "C" __global__ void __launch_bounds__(decode::tiled::THREADS, 2) NAME

#define DECODE_TILED_LINEAR(NAME, T, GEOMETRY)                                                                         \
    DECODE_TILED_KERNEL(NAME)                                                                                          \
    (const T* weight, const T* bias, const T* input, int stride, float* output, float* partial, unsigned* counters,    \
     int batch, int rows, int columns, int steps, int stages) {                                                        \
        decode::tiled::linear<T, decode::tiled::GEOMETRY>(                                                             \
            weight, bias, input, stride, decode::FloatOutput{output}, partial, counters, batch, rows, columns, steps,  \
            stages);                                                                                                   \
    }

#define DECODE_TILED_GATE_UP(NAME, T, GEOMETRY)                                                                        \
    DECODE_TILED_KERNEL(NAME)                                                                                          \
    (const T* weight, const T* bias, const T* input, int stride, T* output, float* partial, unsigned* counters,        \
     int batch, int rows, int columns, int steps, int stages) {                                                        \
        decode::tiled::linear<T, decode::tiled::GEOMETRY>(                                                             \
            weight, bias, input, stride, decode::SiluOutput<T>{output}, partial, counters, batch, rows, columns,       \
            steps, stages);                                                                                            \
    }

#define DECODE_TILED_RESIDUAL(NAME, T, GEOMETRY)                                                                       \
    DECODE_TILED_KERNEL(NAME)                                                                                          \
    (const T* weight, const T* bias, const T* input, int stride, const void* residual, int residual_float,             \
     float* output, float* partial, unsigned* counters, int batch, int rows, int columns, int steps, int stages,       \
     T* features, int feature_stride) {                                                                                \
        decode::tiled::linear<T, decode::tiled::GEOMETRY>(                                                             \
            weight, bias, input, stride,                                                                               \
            decode::ResidualOutput<T>{                                                                                 \
                output, residual, residual_float != 0, {nullptr, 0}, features, feature_stride},                        \
            partial, counters, batch, rows, columns, steps, stages);                                                   \
    }

#define DECODE_TILED_KERNELS(NAME, T)                                                                                  \
    DECODE_TILED_LINEAR(decode_tiled_linear_##NAME, T, Whole)                                                          \
    DECODE_TILED_GATE_UP(decode_tiled_gate_up_##NAME, T, Pairs)                                                        \
    DECODE_TILED_LINEAR(decode_tiled_linear_shared_##NAME, T, Shared)                                                  \
    DECODE_TILED_RESIDUAL(decode_tiled_residual_shared_##NAME, T, Shared)

DECODE_TILED_KERNELS(float16, __half)
DECODE_TILED_KERNELS(bfloat16, __nv_bfloat16)
