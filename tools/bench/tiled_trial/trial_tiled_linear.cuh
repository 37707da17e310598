// Linear layers of 17 to 64 rows of activations, as trees have that are verified: tiles of weight rows times all rows of
// activations.
//
// Every sum has the order of decode_linear.cu: slices of K from zero, four slices a group, then the groups. So a row gets
// the bits of the decode step. A warp multiplies 32 weight rows with all rows of activations, which keeps what it reads
// from shared memory small beside what it multiplies. The warps of a block are one to four teams and the blocks of a
// tile a cluster; each team takes its part of the slices, through a ring of its own, and leaves its sums in shared memory,
// where the blocks of the cluster read them and add them in order.
#include "decode_outputs.cuh"

namespace decode {
namespace tiled {

constexpr int TILED_WARPS = 8, TILED_THREADS = 32 * TILED_WARPS;
constexpr int STEP_BYTES = 64;  // of a row, in one step of 32 columns
constexpr int GROUPS = SLICES / SLICES_OF_A_GROUP;
constexpr int AT_ONCE = 4;  // outputs of a thread whose parts are read together

// ROW_TILES and COLUMN_TILES: of a warp, 16 rows of activations and 8 weight rows each. PAIRED: every second tile of
// weight rows holds up rows, `rows` below the gate rows in the tile before. STAGE_STEPS: steps in a stage of the ring.
template <int ROW_TILES_, int COLUMN_TILES_, int TEAMS_, int STAGE_STEPS_, bool PAIRED_> struct Geometry {
    static constexpr int ROW_TILES = ROW_TILES_, COLUMN_TILES = COLUMN_TILES_, TEAMS = TEAMS_, STAGE_STEPS = STAGE_STEPS_;
    static constexpr bool PAIRED = PAIRED_;
    static constexpr int TEAM_WARPS = TILED_WARPS / TEAMS, TEAM_THREADS = 32 * TEAM_WARPS;
    static constexpr int ROWS = ROW_TILES * 16, WEIGHT_ROWS = TEAM_WARPS * COLUMN_TILES * 8;
    static constexpr int SUMS = PAIRED ? 2 : 1;         // that an output is made of
    static constexpr int UNIT = WEIGHT_ROWS / SUMS;     // output columns of a tile
    static constexpr int STEP_SPACE = (WEIGHT_ROWS + ROWS) * STEP_BYTES, STAGE_BYTES = STAGE_STEPS * STEP_SPACE;
    static constexpr int ROWS_AT_ONCE = TEAM_THREADS / (4 * STAGE_STEPS);  // that a team copies with 16 bytes a thread
    static constexpr int AREA_STRIDE = WEIGHT_ROWS + 8;                    // floats; against bank conflicts
    static constexpr int AREA = ROWS * AREA_STRIDE;                        // floats that a team leaves
    static_assert(COLUMN_TILES % SUMS == 0 && WEIGHT_ROWS % ROWS_AT_ONCE == 0, "");
    static_assert(!PAIRED || ROWS_AT_ONCE % 16 == 0, "");
};

template <int NUMBER, int COUNT> __device__ __forceinline__ void named_barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(NUMBER), "n"(COUNT) : "memory");
}

// Waits for the threads of the own team.
template <typename G> __device__ __forceinline__ void team_barrier(int team) {
    if (G::TEAMS == 1 || team == 0) named_barrier<1, G::TEAM_THREADS>();
    else if (G::TEAMS == 2 || team == 1) named_barrier<2, G::TEAM_THREADS>();
    else if (team == 2) named_barrier<3, G::TEAM_THREADS>();
    else named_barrier<4, G::TEAM_THREADS>();
}

// Waits for all threads of the cluster, and makes visible what they wrote to shared memory.
__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The address, in block `rank` of the cluster, of what lies at `address` in the own shared memory.
__device__ __forceinline__ unsigned address_in_block(unsigned address, int rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
    return address;
}

__device__ __forceinline__ float read_cluster(unsigned address) {
    float value;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
#else
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
#endif
    return value;
}

// What a thread copies into its team's ring: 16 bytes of some weight rows and of some rows of activations, each stage.
template <typename T, typename G> struct Copies {
    static constexpr int LINES_AT_ONCE = G::ROWS_AT_ONCE / G::SUMS;  // of the matrix
    const T *weight, *activations;
    size_t weight_stride, activation_stride;  // from one pass of the team to the next
    unsigned ring;
    int columns, column, step, steps, rows_left, batch_left;  // rows: of weights and activations, from the first own one

    __device__ Copies(
        const T* matrix, const T* input, unsigned team_ring, int first_column, int batch, int rows, int columns,
        int team_steps, int stride)
        : columns(columns), steps(team_steps) {
        const int thread = threadIdx.x % G::TEAM_THREADS, own = thread / (4 * G::STAGE_STEPS), quad = thread % 4;
        step = thread / 4 % G::STAGE_STEPS;
        // Rows change places in twos with the step, so that neighbouring threads write to different banks.
        ring = team_ring + step * G::STEP_SPACE + (own ^ step) * STEP_BYTES + quad * 16;
        column = first_column + step * 32 + quad * 8;
        const int line = blockIdx.x * G::UNIT + (G::PAIRED ? own / 16 * 8 + own % 8 : own);
        const bool is_up = G::PAIRED && own / 8 % 2 == 1;
        rows_left = rows - line, batch_left = min(batch, G::ROWS) - own;
        weight = matrix + static_cast<size_t>(min(line, rows - 1) + (is_up ? rows : 0)) * columns + column;
        activations = input + static_cast<size_t>(min(own, batch - 1)) * stride + column;
        weight_stride = static_cast<size_t>(LINES_AT_ONCE) * columns;
        activation_stride = static_cast<size_t>(G::ROWS_AT_ONCE) * stride;
    }
    __device__ bool inside(int first_step) const {
        return column + first_step * 32 < columns && first_step + step < steps;
    }
    __device__ void copy_weights(int slot, int first_step) const {
        const bool inside = this->inside(first_step);
        const T* source = weight + first_step * 32;
#pragma unroll
        for (int i = 0; i < G::WEIGHT_ROWS / G::ROWS_AT_ONCE; ++i) {
            const bool exists = inside && i * LINES_AT_ONCE < rows_left;
            copy_async_16(ring + slot * G::STAGE_BYTES + i * G::ROWS_AT_ONCE * STEP_BYTES,
                          exists ? source + i * weight_stride : weight, exists);
        }
    }
    __device__ void copy_activations(int slot, int first_step) const {
        if (G::ROWS < G::ROWS_AT_ONCE && batch_left <= 0) return;
        const bool inside = this->inside(first_step);
        const T* source = activations + first_step * 32;
#pragma unroll
        for (int i = 0; i < (G::ROWS + G::ROWS_AT_ONCE - 1) / G::ROWS_AT_ONCE; ++i) {
            const bool exists = inside && i * G::ROWS_AT_ONCE < batch_left;
            copy_async_16(ring + slot * G::STAGE_BYTES + (G::WEIGHT_ROWS + i * G::ROWS_AT_ONCE) * STEP_BYTES,
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
    uint4 b[G::COLUMN_TILES];
#pragma unroll
    for (int c = 0; c < G::COLUMN_TILES; ++c) b[c] = read_shared_16(weights + c * 8 * STEP_BYTES);
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r) {
        const uint4 upper = read_shared_16(activations + r * 16 * STEP_BYTES);
        const uint4 lower = read_shared_16(activations + (r * 16 + 8) * STEP_BYTES);
        const unsigned x[2] = {upper.x, lower.x}, y[2] = {upper.y, lower.y};
        const unsigned z[2] = {upper.z, lower.z}, w[2] = {upper.w, lower.w};
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; ++c) multiply_add(sum[r][c], x, y, b[c].x, b[c].y, T());
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; ++c) multiply_add(sum[r][c], z, w, b[c].z, b[c].w, T());
    }
}

// Returns when the oldest of the thread's `stages` - 1 youngest groups of copies has come.
__device__ __forceinline__ void wait_for_stage(int stages) {
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

// Sums of the thread into an area [ROWS, AREA_STRIDE]; of PAIRED tiles the gates' first. adds: to what is there.
template <typename G> __device__ __forceinline__ void leave(const Sums<G>& sum, float* area, int column_warp, bool adds) {
    const int lane_row = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int c = 0; c < G::COLUMN_TILES; ++c) {
                const int tile = column_warp * G::COLUMN_TILES + c;
                const int column = (G::PAIRED ? tile % 2 * G::UNIT + tile / 2 * 8 : tile * 8) + quad * 2;
                float2* place =
                    reinterpret_cast<float2*>(area + (r * 16 + half * 8 + lane_row) * G::AREA_STRIDE + column);
                float2 value = make_float2(sum[r][c][2 * half], sum[r][c][2 * half + 1]);
                if (adds) {
                    const float2 before = *place;
                    value.x = before.x + value.x, value.y = before.y + value.y;
                }
                *place = value;
            }
}

// rows: N, or half of it where PAIRED. input: [batch, stride]. stages: 2 to 8. Grid (tiles, splits) in clusters of
// (1, splits); splits 1, 2, 4 or 8, and at most 16 with the teams. Dynamic shared memory, each once a team: the rings, or
// where they are smaller an area; then another area where a team leaves two or more sums.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void linear(
    const T* weight, const T* bias, const T* input, int stride, const Output& output, int batch, int rows, int columns,
    int steps, int stages) {
    extern __shared__ __align__(16) char shared[];
    const int team = threadIdx.x / G::TEAM_THREADS, column_warp = threadIdx.x % G::TEAM_THREADS / 32;
    const int splits = gridDim.y, rank = blockIdx.y, parts = splits * G::TEAMS;
    const bool of_slices = parts > GROUPS;  // a team leaves sums of slices, otherwise of groups
    const int items = (of_slices ? SLICES : GROUPS) / parts, item_steps = (of_slices ? 1 : SLICES_OF_A_GROUP) * steps;
    const int team_steps = items * item_steps, team_stages = (team_steps + G::STAGE_STEPS - 1) / G::STAGE_STEPS;
    const int ring_bytes = max(stages * G::STAGE_BYTES, G::AREA * 4);
    const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(shared)), ring = base + team * ring_bytes;
    const auto last_area = [&](int of_team) { return reinterpret_cast<float*>(shared + of_team * ring_bytes); };
    const auto first_area = [&](int of_team) {
        return reinterpret_cast<float*>(shared + G::TEAMS * ring_bytes) + of_team * G::AREA;
    };

    launch_next_kernel();
    const Copies<T, G> copies(
        weight, input, ring, (rank * G::TEAMS + team) * team_steps * 32, batch, rows, columns, team_steps, stride);
    for (int stage = 0; stage < stages - 1; ++stage)
        if (stage < team_stages) copies.copy_weights(stage, stage * G::STAGE_STEPS);
    commit_copies();
    wait_for_previous_kernel();
    for (int stage = 0; stage < stages - 1; ++stage) {
        if (stage < team_stages) copies.copy_activations(stage, stage * G::STAGE_STEPS);
        commit_copies();
    }

    Sums<G> sum = {}, part = {};
    int slot = 0, next_slot = stages - 1, slice_step = 0, item_step = 0, item = 0;
    const int lane_row = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    for (int stage = 0; stage < team_stages; ++stage) {
        wait_for_stage(stages);
        team_barrier<G>(team);  // what all copied of this stage has come, and the one before has been read by all
        if (stage + stages - 1 < team_stages) {
            copies.copy_weights(next_slot, (stage + stages - 1) * G::STAGE_STEPS);
            copies.copy_activations(next_slot, (stage + stages - 1) * G::STAGE_STEPS);
        }
        commit_copies();
#pragma unroll
        for (int step = 0; step < G::STAGE_STEPS; ++step) {
            if (stage * G::STAGE_STEPS + step >= team_steps) break;
            const unsigned place = (lane_row ^ step) * STEP_BYTES + quad * 16;
            const unsigned lane = ring + slot * G::STAGE_BYTES + step * G::STEP_SPACE + place;
            multiply<T, G>(sum, lane + column_warp * G::COLUMN_TILES * 8 * STEP_BYTES, lane + G::WEIGHT_ROWS * STEP_BYTES);
            if (++slice_step < steps) continue;
            slice_step = 0;
            for_each_sum<G>([&](int r, int c, int i) { part[r][c][i] += sum[r][c][i], sum[r][c][i] = 0.f; });
            item_step += steps;
            if (item_step < item_steps || ++item == items) continue;
            item_step = 0;
            leave<G>(part, first_area(team), column_warp, item > 1);
            for_each_sum<G>([&](int r, int c, int i) { part[r][c][i] = 0.f; });
        }
        next_slot = slot;
        slot = slot + 1 == stages ? 0 : slot + 1;
    }
    team_barrier<G>(team);  // the ring has been read by all: it takes the last sums
    leave<G>(part, last_area(team), column_warp, false);

    bool two = items > 1;                                          // areas that a team has left
    const int of_group = max(parts / GROUPS, 1);                   // teams that share a group
    const bool own_groups = of_slices && splits <= GROUPS;         // all of them in this block
    if (own_groups) {
        __syncthreads();
        constexpr int ROW_QUADS = G::WEIGHT_ROWS / 4;
        const int quads = batch * ROW_QUADS;
        for (int i = threadIdx.x; i < G::TEAMS / of_group * quads; i += TILED_THREADS) {
            const int first = i / quads * of_group, place = i % quads / ROW_QUADS * G::AREA_STRIDE + i % ROW_QUADS * 4;
            float4 group = make_float4(0.f, 0.f, 0.f, 0.f);
            const auto add = [&](const float* area) {
                const float4 value = *reinterpret_cast<const float4*>(area + place);
                group.x += value.x, group.y += value.y, group.z += value.z, group.w += value.w;
            };
            for (int t = first; t < first + of_group; ++t) {
                if (two) add(first_area(t));
                add(last_area(t));
            }
            *reinterpret_cast<float4*>(last_area(first) + place) = group;
        }
        two = false;
    }
    if (splits > 1) cluster_barrier();
    else __syncthreads();

    const int team_stride = own_groups ? of_group : 1;
    for (int first = 0; first < batch * G::UNIT; first += AT_ONCE * splits * TILED_THREADS) {
        float total[AT_ONCE][G::SUMS] = {}, group[AT_ONCE][G::SUMS] = {};
        int b[AT_ONCE], column[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int place = first + (k * splits + rank) * TILED_THREADS + static_cast<int>(threadIdx.x);
            b[k] = place / G::UNIT, column[k] = place % G::UNIT;
        }
        const auto add = [&](unsigned area, bool ends_group) {
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k)
#pragma unroll
                for (int s = 0; s < G::SUMS; ++s) {
                    const int place = min(b[k], G::ROWS - 1) * G::AREA_STRIDE + s * G::UNIT + column[k];
                    group[k][s] += read_cluster(area + place * 4);
                    if (ends_group) total[k][s] += group[k][s], group[k][s] = 0.f;
                }
        };
        for (int split = 0; split < splits; ++split) {
            const unsigned theirs = address_in_block(base, split);
#pragma unroll
            for (int t = 0; t < G::TEAMS; ++t) {
                if (t % team_stride != 0) continue;
                const bool ends = !of_slices || own_groups || (split * G::TEAMS + t + 1) % of_group == 0;
                if (two) add(theirs + G::TEAMS * ring_bytes + t * G::AREA * 4, !of_slices);
                add(theirs + t * ring_bytes, ends);
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int n = blockIdx.x * G::UNIT + column[k];
            if (b[k] >= batch || n >= rows) continue;
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s)
                if (bias != nullptr) total[k][s] += to_float(bias[s * rows + n]);
            output(b[k], n, rows, total[k]);
        }
    }
    if (splits > 1) cluster_barrier();  // others have read what this block left
}

}  // namespace tiled
}  // namespace decode

#define TRIAL_KERNELS(SUFFIX, T, R, C, TEAMS, STEPS, BLOCKS)                                                           \
    extern "C" __global__ void __launch_bounds__(decode::tiled::TILED_THREADS, BLOCKS) trial_linear_##SUFFIX(          \
        const T* weight, const T* bias, const T* input, int stride, float* output, int batch, int rows, int columns,   \
        int steps, int stages) {                                                                                       \
        decode::tiled::linear<T, decode::tiled::Geometry<R, C, TEAMS, STEPS, false>>(                                  \
            weight, bias, input, stride, decode::FloatOutput{output}, batch, rows, columns, steps, stages);            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(decode::tiled::TILED_THREADS, BLOCKS) trial_residual_##SUFFIX(        \
        const T* weight, const T* bias, const T* input, int stride, const void* residual, int residual_float,          \
        float* output, int batch, int rows, int columns, int steps, int stages, T* features, int feature_stride) {     \
        decode::tiled::linear<T, decode::tiled::Geometry<R, C, TEAMS, STEPS, false>>(                                  \
            weight, bias, input, stride,                                                                               \
            decode::ResidualOutput<T>{                                                                                 \
                output, residual, residual_float != 0, {nullptr, 0}, features, feature_stride},                        \
            batch, rows, columns, steps, stages);                                                                      \
    }

#define TRIAL_GATE_UP(SUFFIX, T, R, C, TEAMS, STEPS, BLOCKS)                                                           \
    extern "C" __global__ void __launch_bounds__(decode::tiled::TILED_THREADS, BLOCKS) trial_gate_up_##SUFFIX(         \
        const T* weight, const T* bias, const T* input, int stride, T* output, int batch, int rows, int columns,       \
        int steps, int stages) {                                                                                       \
        decode::tiled::linear<T, decode::tiled::Geometry<R, C, TEAMS, STEPS, true>>(                                   \
            weight, bias, input, stride, decode::SiluOutput<T>{output}, batch, rows, columns, steps, stages);          \
    }
