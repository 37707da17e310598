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
constexpr int STEP_BYTES = 64;   // of a row, in one step of 32 columns
constexpr int GROUPS = SLICES / SLICES_OF_A_GROUP;
constexpr int MOST_STAGES = 8;
constexpr int AT_ONCE = 2;  // times four outputs of a thread whose residuals are read together

// ROW_TILES: of a warp, 16 rows of activations each. PAIRED: the second half of a tile's weight rows holds up rows, `rows`
// below the gate rows in the first half. BULK: tiles are copied by the tensor memory accelerator (sm_90 and later).
template <int ROW_TILES_, int COLUMN_TILES_, int TEAMS_, bool PAIRED_, bool BULK_> struct Geometry {
    static constexpr int ROW_TILES = ROW_TILES_, COLUMN_TILES = COLUMN_TILES_, TEAMS = TEAMS_;
    static constexpr bool PAIRED = PAIRED_, BULK = BULK_;
    static constexpr int TEAM_WARPS = TILED_WARPS / TEAMS, TEAM_THREADS = 32 * TEAM_WARPS;
    static constexpr int ROWS = ROW_TILES * 16, WEIGHT_ROWS = TEAM_WARPS * COLUMN_TILES * 8;
    static constexpr int SUMS = PAIRED ? 2 : 1;      // that an output is made of
    static constexpr int UNIT = WEIGHT_ROWS / SUMS;  // output columns of a tile
    static constexpr int STAGE_BYTES = (WEIGHT_ROWS + ROWS) * STEP_BYTES;
    static constexpr int ROWS_AT_ONCE = TEAM_THREADS / 4;     // that a team copies with 16 bytes a thread
    static constexpr int AREA_STRIDE = WEIGHT_ROWS + 8;       // floats; against bank conflicts
    static constexpr int AREA = ROWS * AREA_STRIDE;           // floats that a team leaves
};

struct __align__(64) TensorMap {
    unsigned long long opaque[16];
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

__device__ __forceinline__ float4 read_cluster(unsigned address) {
    float4 value;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address));
#else
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address));
#endif
    return value;
}

// Barriers in shared memory that count bytes which the tensor memory accelerator has copied.
__device__ __forceinline__ void start_barrier(unsigned barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
#endif
}

__device__ __forceinline__ void publish_barriers() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void expect_bytes(unsigned barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

__device__ __forceinline__ void wait_for_bytes(unsigned barrier, int parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred ready;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ready, [%0], %1;\n@!ready bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

// The tile of `map` whose first row and column are these; zeros where there are none.
__device__ __forceinline__ void copy_tile(unsigned shared, const TensorMap* map, int column, int row, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
#endif
}

// What a thread copies into its team's ring: 16 bytes of some weight rows and of some rows of activations, each stage.
template <typename T, typename G> struct Copies {
    const T *weight, *activations;
    unsigned ring;
    int columns, column, stride, own, line, lines, batch;  // line: the first own one of the tile's lines that exist

    __device__ Copies(
        const T* matrix, const T* input, unsigned team_ring, int first_column, int batch, int rows, int columns,
        int stride)
        : columns(columns), stride(stride), batch(batch) {
        const int thread = threadIdx.x % G::TEAM_THREADS, quad = thread % 4;
        own = thread / 4;
        ring = team_ring + own * STEP_BYTES + quad * 16;
        column = first_column + quad * 8;
        line = blockIdx.x * G::UNIT + own, lines = rows;
        weight = matrix + column, activations = input + column;
    }
    __device__ void copy_weights(int slot, int first_step) const {
        const bool inside = column + first_step * 32 < columns;
#pragma unroll
        for (int i = 0; i < G::WEIGHT_ROWS / G::ROWS_AT_ONCE; ++i) {
            // Of PAIRED tiles the lines of the second half are those of the first, `rows` further down.
            constexpr int PASSES = G::UNIT / G::ROWS_AT_ONCE;
            const int up = PASSES == 0 ? own / G::UNIT : i / (PASSES == 0 ? 1 : PASSES);
            const int place = line + i * G::ROWS_AT_ONCE - up * G::UNIT;
            const bool exists = inside && place < lines;
            const T* source = weight + static_cast<size_t>(exists ? place + up * lines : 0) * columns + first_step * 32;
            copy_async_16(ring + slot * G::STAGE_BYTES + i * G::ROWS_AT_ONCE * STEP_BYTES,
                          exists ? source : weight, exists);
        }
    }
    __device__ void copy_activations(int slot, int first_step) const {
        if (G::ROWS < G::ROWS_AT_ONCE && own >= G::ROWS) return;
        const bool inside = column + first_step * 32 < columns;
#pragma unroll
        for (int i = 0; i < (G::ROWS + G::ROWS_AT_ONCE - 1) / G::ROWS_AT_ONCE; ++i) {
            const bool exists = inside && own + i * G::ROWS_AT_ONCE < batch;
            const T* source = activations + static_cast<size_t>(own + i * G::ROWS_AT_ONCE) * stride + first_step * 32;
            copy_async_16(ring + slot * G::STAGE_BYTES + (G::WEIGHT_ROWS + i * G::ROWS_AT_ONCE) * STEP_BYTES,
                          exists ? source : activations, exists);
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

// The first weight row, in the tile, of a warp's tile `c`; of PAIRED tiles every second one holds up rows.
template <typename G> __device__ __forceinline__ int tile_row(int column_warp, int c) {
    const int tile = column_warp * G::COLUMN_TILES + c;
    return G::PAIRED ? tile % 2 * G::UNIT + tile / 2 * 8 : tile * 8;
}

// One step of 32 columns; `weights` and `activations`: of the lane, in the stage's shared memory.
template <typename T, typename G>
__device__ __forceinline__ void multiply(Sums<G>& sum, unsigned weights, unsigned activations, int column_warp) {
    uint4 b[G::COLUMN_TILES];
    unsigned a[G::ROW_TILES][4][2];
#pragma unroll
    for (int c = 0; c < G::COLUMN_TILES; ++c) b[c] = read_shared_16(weights + tile_row<G>(column_warp, c) * STEP_BYTES);
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 values = read_shared_16(activations + (r * 2 + half) * 8 * STEP_BYTES);
            a[r][0][half] = values.x, a[r][1][half] = values.y, a[r][2][half] = values.z, a[r][3][half] = values.w;
        }
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; ++c) multiply_add(sum[r][c], a[r][0], a[r][1], b[c].x, b[c].y, T());
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; ++c) multiply_add(sum[r][c], a[r][2], a[r][3], b[c].z, b[c].w, T());
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

// Sums of the thread into an area [ROWS, AREA_STRIDE]. adds: to what is there.
template <typename G> __device__ __forceinline__ void leave(const Sums<G>& sum, float* area, int column_warp, bool adds) {
    const int lane_row = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int c = 0; c < G::COLUMN_TILES; ++c) {
                const int row = r * 16 + half * 8 + lane_row, column = tile_row<G>(column_warp, c) + quad * 2;
                float2* place = reinterpret_cast<float2*>(area + row * G::AREA_STRIDE + column);
                float2 value = make_float2(sum[r][c][2 * half], sum[r][c][2 * half + 1]);
                if (adds) {
                    const float2 before = *place;
                    value.x = before.x + value.x, value.y = before.y + value.y;
                }
                *place = value;
            }
}

__device__ __forceinline__ void add_to(float4& sum, const float4& value) {
    sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
}

// What becomes of four neighbouring sums, where rows are a multiple of four: first what must be read for it, then the rest.
template <typename Output> __device__ __forceinline__ float4 read_before(const Output&, int, int, int) {
    return make_float4(0.f, 0.f, 0.f, 0.f);
}

template <typename T>
__device__ __forceinline__ float4 read_before(const ResidualOutput<T>& output, int b, int n, int rows) {
    if (output.residual == nullptr) return make_float4(0.f, 0.f, 0.f, 0.f);
    const size_t index = static_cast<size_t>(output.source(b)) * rows + n;
    if (output.residual_float)
        return __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(output.residual) + index));
    const uint2 packed = __ldcg(reinterpret_cast<const uint2*>(static_cast<const T*>(output.residual) + index));
    const float2 low = unpack<T>(packed.x), high = unpack<T>(packed.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

__device__ __forceinline__ void write(
    const FloatOutput& output, int b, int n, int rows, const float4 (&sum)[1], const float4&) {
    *reinterpret_cast<float4*>(output.output + static_cast<size_t>(b) * rows + n) = sum[0];
}

template <typename T>
__device__ __forceinline__ void write(
    const ResidualOutput<T>& output, int b, int n, int rows, const float4 (&sum)[1], const float4& before) {
    if (output.features != nullptr)
        *reinterpret_cast<uint2*>(output.features + static_cast<size_t>(b) * output.feature_stride + n) =
            make_uint2(pack<T>(before.x, before.y), pack<T>(before.z, before.w));
    *reinterpret_cast<float4*>(output.output + static_cast<size_t>(b) * rows + n) =
        make_float4(before.x + sum[0].x, before.y + sum[0].y, before.z + sum[0].z, before.w + sum[0].w);
}

template <typename T>
__device__ __forceinline__ void write(
    const SiluOutput<T>& output, int b, int n, int rows, const float4 (&sum)[2], const float4&) {
    const auto silu = [](float gate, float up) { return gate / (1.f + expf(-gate)) * up; };
    *reinterpret_cast<uint2*>(output.output + static_cast<size_t>(b) * rows + n) =
        make_uint2(pack<T>(silu(sum[0].x, sum[1].x), silu(sum[0].y, sum[1].y)),
                   pack<T>(silu(sum[0].z, sum[1].z), silu(sum[0].w, sum[1].w)));
}

// rows: N, or half of it where PAIRED. input: [batch, stride]. stages: 2 to 8. Grid (tiles, splits) in clusters of
// (1, splits); splits 1, 2 or 4. Dynamic shared memory, each once a team: the rings, or where they are smaller an area;
// then another area where a team leaves two or more sums.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void linear(
    const TensorMap* weight_map, const TensorMap* input_map, const T* weight, const T* bias, const T* input, int stride,
    const Output& output, int batch, int rows, int columns, int steps, int stages) {
    extern __shared__ __align__(128) char shared[];
    __shared__ __align__(8) unsigned long long barriers[G::TEAMS][MOST_STAGES];
    const int team = threadIdx.x / G::TEAM_THREADS, column_warp = threadIdx.x % G::TEAM_THREADS / 32;
    const int splits = gridDim.y, rank = blockIdx.y, parts = splits * G::TEAMS;
    const bool of_slices = parts > GROUPS;  // a team leaves sums of slices, otherwise of groups
    const int items = (of_slices ? SLICES : GROUPS) / parts, item_steps = (of_slices ? 1 : SLICES_OF_A_GROUP) * steps;
    const int team_steps = items * item_steps;
    const int ring_bytes = max(stages * G::STAGE_BYTES, G::AREA * 4);
    const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(shared)), ring = base + team * ring_bytes;
    const unsigned barrier = static_cast<unsigned>(__cvta_generic_to_shared(reinterpret_cast<char*>(barriers[team])));
    const auto last_area = [&](int of_team) { return of_team * ring_bytes; };
    const auto first_area = [&](int of_team) { return G::TEAMS * ring_bytes + of_team * G::AREA * 4; };
    const auto area_at = [&](int offset) { return reinterpret_cast<float*>(shared + offset); };

    launch_next_kernel();
    const int first_column = (rank * G::TEAMS + team) * team_steps * 32;
    const bool leads = threadIdx.x % G::TEAM_THREADS == 0;
    const Copies<T, G> copies(weight, input, ring, first_column, batch, rows, columns, stride);
    const auto copy_weights = [&](int slot, int step) {
        if (!G::BULK) return copies.copy_weights(slot, step);
        if (!leads) return;
        const unsigned place = ring + slot * G::STAGE_BYTES;
        expect_bytes(barrier + slot * 8, G::STAGE_BYTES);
#pragma unroll
        for (int s = 0; s < G::SUMS; ++s)
            copy_tile(place + s * G::UNIT * STEP_BYTES, weight_map, first_column + step * 32,
                      s * rows + blockIdx.x * G::UNIT, barrier + slot * 8);
    };
    const auto copy_activations = [&](int slot, int step) {
        if (!G::BULK) return copies.copy_activations(slot, step);
        if (leads)
            copy_tile(ring + slot * G::STAGE_BYTES + G::WEIGHT_ROWS * STEP_BYTES, input_map, first_column + step * 32, 0,
                      barrier + slot * 8);
    };
    if (G::BULK) {
        if (leads)
            for (int stage = 0; stage < stages; ++stage) start_barrier(barrier + stage * 8);
        publish_barriers();
        __syncthreads();
    }
    for (int stage = 0; stage < stages - 1; ++stage)
        if (stage < team_steps) copy_weights(stage, stage);
    commit_copies();
    wait_for_previous_kernel();
    for (int stage = 0; stage < stages - 1; ++stage) {
        if (stage < team_steps) copy_activations(stage, stage);
        commit_copies();
    }

    Sums<G> sum = {}, part = {};
    int slot = 0, next_slot = stages - 1, slice_step = 0, item_step = 0, item = 0, parity = 0;
    const unsigned lane = ring + threadIdx.x % 32 * 16;
    for (int step = 0; step < team_steps; ++step) {
        if (G::BULK) wait_for_bytes(barrier + slot * 8, parity);
        else wait_for_stage(stages);
        team_barrier<G>(team);  // what all copied of this stage has come, and the one before has been read by all
        if (step + stages - 1 < team_steps) {
            copy_weights(next_slot, step + stages - 1);
            copy_activations(next_slot, step + stages - 1);
        }
        if (!G::BULK) commit_copies();
        const unsigned stage = lane + slot * G::STAGE_BYTES;
        multiply<T, G>(sum, stage, stage + G::WEIGHT_ROWS * STEP_BYTES, column_warp);
        next_slot = slot;
        slot = slot + 1 == stages ? 0 : slot + 1;
        if (slot == 0) parity ^= 1;
        if (++slice_step < steps) continue;
        slice_step = 0;
        for_each_sum<G>([&](int r, int c, int i) { part[r][c][i] += sum[r][c][i], sum[r][c][i] = 0.f; });
        item_step += steps;
        if (item_step < item_steps || ++item == items) continue;
        item_step = 0;
        leave<G>(part, area_at(first_area(team)), column_warp, item > 1);
        for_each_sum<G>([&](int r, int c, int i) { part[r][c][i] = 0.f; });
    }

    constexpr int QUADS = G::UNIT / 4;  // of a row, four outputs each
    const bool in_fours = rows % 4 == 0;
    float4 before[AT_ONCE];
    const auto quad_at = [&](int first, int k) { return first + (k * splits + rank) * TILED_THREADS + static_cast<int>(threadIdx.x); };
    const auto read_residuals = [&](int first) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int b = quad_at(first, k) / QUADS, n = blockIdx.x * G::UNIT + quad_at(first, k) % QUADS * 4;
            if (in_fours && b < batch && n < rows) before[k] = read_before(output, b, n, rows);
        }
    };
    read_residuals(0);
    team_barrier<G>(team);  // the ring has been read by all: it takes the last sums
    leave<G>(part, area_at(last_area(team)), column_warp, false);

    const int of_group = max(parts / GROUPS, 1);  // teams of this block that share a group
    if (of_slices) {
        __syncthreads();
        constexpr int ROW_QUADS = G::WEIGHT_ROWS / 4;
        const int quads = batch * ROW_QUADS;
        for (int i = threadIdx.x; i < G::TEAMS / of_group * quads; i += TILED_THREADS) {
            const int first = i / quads * of_group;
            const int place = i % quads / ROW_QUADS * G::AREA_STRIDE + i % ROW_QUADS * 4;
            float4 group = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int t = 0; t < G::TEAMS; ++t) {
                if (t >= of_group) continue;
                if (items > 1) add_to(group, *reinterpret_cast<const float4*>(area_at(first_area(first + t)) + place));
                add_to(group, *reinterpret_cast<const float4*>(area_at(last_area(first + t)) + place));
            }
            *reinterpret_cast<float4*>(area_at(last_area(first)) + place) = group;
        }
    }
    // Where the groups lie; one block with one team has added the first three.
    unsigned groups[GROUPS];
    const int count = parts == 1 ? 2 : GROUPS;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const int own = g % (GROUPS / splits), of_team = max(GROUPS / parts, 1);
        const int offset = of_slices       ? last_area(own * of_group)
                           : parts == 1    ? (g == 0 ? first_area(0) : last_area(0))
                           : of_team == 2  ? (own % 2 == 0 ? first_area(own / 2) : last_area(own / 2))
                                           : last_area(own);
        groups[g] = address_in_block(base, g / (GROUPS / splits)) + offset;
    }
    if (splits > 1) cluster_barrier();
    else __syncthreads();

    for (int first = 0; first < batch * QUADS; first += AT_ONCE * splits * TILED_THREADS) {
        if (first > 0) read_residuals(first);
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int b = quad_at(first, k) / QUADS, column = quad_at(first, k) % QUADS * 4;
            const int n = blockIdx.x * G::UNIT + column;
            if (b >= batch || n >= rows) continue;
            float4 total[G::SUMS], values[G::SUMS][GROUPS];
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s)
#pragma unroll
                for (int g = 0; g < GROUPS; ++g)
                    if (g < count) values[s][g] = read_cluster(groups[g] + (b * G::AREA_STRIDE + s * G::UNIT + column) * 4);
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s) {
                total[s] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
                for (int g = 0; g < GROUPS; ++g)
                    if (g < count) add_to(total[s], values[s][g]);
                if (bias != nullptr) {
                    const T* own = bias + s * rows + n;
                    const auto of = [&](int i) { return n + i < rows ? to_float(own[i]) : 0.f; };
                    add_to(total[s], make_float4(of(0), of(1), of(2), of(3)));
                }
            }
            if (in_fours) {
                write(output, b, n, rows, total, before[k]);
                continue;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float one[G::SUMS];
#pragma unroll
                for (int s = 0; s < G::SUMS; ++s)
                    one[s] = i == 0 ? total[s].x : i == 1 ? total[s].y : i == 2 ? total[s].z : total[s].w;
                if (n + i < rows) output(b, n + i, rows, one);
            }
        }
    }
    if (splits > 1) cluster_barrier();  // others have read what this block left
}

}  // namespace tiled
}  // namespace decode

#define TRIAL_PARAMETERS(T)                                                                                            \
    const __grid_constant__ decode::tiled::TensorMap weight_map, const __grid_constant__ decode::tiled::TensorMap      \
        input_map, const T *weight, const T *bias, const T *input, int stride

#define TRIAL_KERNELS(SUFFIX, T, R, C, TEAMS, BULK, BLOCKS)                                                               \
    extern "C" __global__ void __launch_bounds__(decode::tiled::TILED_THREADS, BLOCKS) trial_linear_##SUFFIX(          \
        TRIAL_PARAMETERS(T), float* output, int batch, int rows, int columns, int steps, int stages) {                 \
        decode::tiled::linear<T, decode::tiled::Geometry<R, C, TEAMS, false, BULK>>(                                      \
            &weight_map, &input_map, weight, bias, input, stride, decode::FloatOutput{output}, batch, rows, columns,   \
            steps, stages);                                                                                            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(decode::tiled::TILED_THREADS, BLOCKS) trial_gate_up_##SUFFIX(         \
        TRIAL_PARAMETERS(T), T* output, int batch, int rows, int columns, int steps, int stages) {                     \
        decode::tiled::linear<T, decode::tiled::Geometry<R, C, TEAMS, true, BULK>>(                                       \
            &weight_map, &input_map, weight, bias, input, stride, decode::SiluOutput<T>{output}, batch, rows, columns, \
            steps, stages);                                                                                            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(decode::tiled::TILED_THREADS, BLOCKS) trial_residual_##SUFFIX(        \
        TRIAL_PARAMETERS(T), const void* residual, int residual_float, float* output, int batch, int rows,             \
        int columns, int steps, int stages, T* features, int feature_stride) {                                         \
        decode::tiled::linear<T, decode::tiled::Geometry<R, C, TEAMS, false, BULK>>(                                      \
            &weight_map, &input_map, weight, bias, input, stride,                                                      \
            decode::ResidualOutput<T>{                                                                                 \
                output, residual, residual_float != 0, {nullptr, 0}, features, feature_stride},                        \
            batch, rows, columns, steps, stages);                                                                      \
    }
