// Linear layers of up to 64 rows of activations, as trees have that are verified: tiles of weight rows times all rows of
// activations.
//
// Every sum has the order of linear.cu: slices of K from zero, four slices a group, then the groups. So a row gets
// the bits of the decode step. A warp multiplies 16 or 32 weight rows with all rows of activations, which keeps what it
// reads from shared memory small beside what it multiplies. The warps of a block are two or four teams, the blocks of a
// tile a cluster. Each team takes its part of the slices, through a ring of its own, and leaves its sums in shared memory,
// where the blocks of the cluster read them and add them in order.
#include "shared/clusters.cuh"
#include "decode/outputs.cuh"
#include "decode/tiled_ring.cuh"

namespace decode {
namespace tiled {

constexpr int TILED_THREADS = HOST_TILED_THREADS, TILED_WARPS = TILED_THREADS / 32;
constexpr int GROUPS = SLICES / SLICES_OF_A_GROUP;
constexpr int AT_ONCE = 2;  // times four outputs of a thread whose residuals are read together

// A tile of WEIGHT_ROWS_ times ROWS_ of activations; BLOCKS_ on a multiprocessor. ROW_TILES and COLUMN_TILES: of a warp, 16
// rows of activations and 8 weight rows each. PAIRED: the second half of a tile's weight rows holds up rows, `rows` below the
// gate rows in the first half.
template <int ROWS_, int WEIGHT_ROWS_, int TEAMS_, int BLOCKS_, bool PAIRED_> struct Geometry {
    static constexpr int ROWS = ROWS_, WEIGHT_ROWS = WEIGHT_ROWS_, TEAMS = TEAMS_, BLOCKS = BLOCKS_;
    static constexpr bool PAIRED = PAIRED_;
    static constexpr int TEAM_WARPS = TILED_WARPS / TEAMS, TEAM_THREADS = 32 * TEAM_WARPS;
    static constexpr int ROW_TILES = ROWS / 16, COLUMN_TILES = WEIGHT_ROWS / (8 * TEAM_WARPS);
    static constexpr int SUMS = PAIRED ? 2 : 1;      // that an output is made of
    static constexpr int UNIT = WEIGHT_ROWS / SUMS;  // output columns of a tile
    static constexpr int STAGE_BYTES = (WEIGHT_ROWS + ROWS) * ROW_BYTES;
    static constexpr int AREA_STRIDE = WEIGHT_ROWS + 4;  // floats; against bank conflicts
    static constexpr int AREA = ROWS * AREA_STRIDE;      // floats that a team leaves
    static_assert(STAGE_STEPS == 1 || (STAGE_BYTES % 1024 == 0 && 2 * STAGE_BYTES >= AREA * 4),
                  "every stage of every ring begins where the tensor memory accelerator's swizzling begins");

    static __device__ constexpr int ring_bytes(int stages) { return max_of(stages * STAGE_BYTES, AREA * 4); }
    static __device__ constexpr int shared_bytes(int stages, int splits) {
        const int parts = splits * TEAMS, items = (parts > GROUPS ? SLICES : GROUPS) / parts;
        return TEAMS * (ring_bytes(stages) + (items > 1 ? AREA * 4 : 0) + MOST_STAGES * 8);
    }
    static __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
};
using Small = Geometry<32, 64, 4, 2, false>;
using Large = Geometry<64, 128, 2, 1, false>;
static_assert(Small::shared_bytes(3, 1) == (STAGE_STEPS == 2 ? HOST_SMALL_BYTES : HOST_SMALL_BYTES_ALONE) &&
                  Large::shared_bytes(2, 1) == (STAGE_STEPS == 2 ? HOST_LARGE_BYTES : HOST_LARGE_BYTES_ALONE),
              "the host gives a block its shared memory");

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
    for (int c = 0; c < G::COLUMN_TILES; ++c) b[c] = read_shared_16(weights + tile_row<G>(column_warp, c) * ROW_BYTES);
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 values = read_shared_16(activations + (r * 2 + half) * 8 * ROW_BYTES);
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

// Sums of the thread into an area [ROWS, AREA_STRIDE].
template <typename G> __device__ __forceinline__ void leave(const Sums<G>& sum, float* area, int column_warp) {
    const int lane_row = row_of_eight(threadIdx.x % 32 / 4), quad = threadIdx.x % 4;
    for_each_sum<G>([&](int r, int c, int i) {
        const int row = r * 16 + i / 2 * 8 + lane_row, column = row_of_eight(quad * 2 + i % 2);
        area[row * G::AREA_STRIDE + tile_row<G>(column_warp, c) + column] = sum[r][c][i];
    });
}

__device__ __forceinline__ void add_to(float4& sum, const float4& value) {
    sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
}

// How the slices of K are shared by `splits` blocks of a cluster, each with TEAMS teams, and where teams leave sums.
template <typename G> struct Shares {
    int splits, rank, parts, steps, ring_bytes;

    __device__ Shares(int slice_steps, int stages)
        : splits(gridDim.y), rank(blockIdx.y), parts(gridDim.y * G::TEAMS), steps(slice_steps),
          ring_bytes(G::ring_bytes(stages)) {}
    __device__ bool of_slices() const { return parts > GROUPS; }  // a team leaves sums of slices, otherwise of groups
    __device__ int items() const { return (of_slices() ? SLICES : GROUPS) / parts; }  // of a team
    __device__ int item_steps() const { return (of_slices() ? 1 : SLICES_OF_A_GROUP) * steps; }
    __device__ int team_steps() const { return items() * item_steps(); }
    __device__ int group_teams() const { return max(parts / GROUPS, 1); }  // of a block, that share a group
    // Offsets in shared memory: of the area of a team's last item, and of the one for those before.
    __device__ int last_area(int team) const { return team * ring_bytes; }
    __device__ int first_area(int team) const { return G::TEAMS * ring_bytes + team * G::AREA * 4; }
    __device__ int barriers(int team) const { return first_area(items() > 1 ? G::TEAMS : 0) + team * MOST_STAGES * 8; }
    // Of the block's own group `own`, once slices are joined.
    __device__ int group_area(int own) const {
        if (of_slices()) return last_area(own * group_teams());
        const int team_groups = GROUPS / parts;  // one, or two
        return (own + 1) % team_groups == 0 ? last_area(own / team_groups) : first_area(own / team_groups);
    }
};

// The sums of the team's part: of two items the first is left in its first area, the last one is returned.
template <typename T, typename G>
__device__ __forceinline__ void multiply_part(
    Sums<G>& part, Ring<T, G>& ring, const Shares<G>& shares, unsigned first_stage, float* first_area, int team,
    int column_warp, int stages) {
    const int item_steps = shares.item_steps(), team_steps = shares.team_steps();
    Sums<G> sum = {};
    int stage = 0, next_stage = stages - 1, slice_step = 0, summed = 0;
    for (int first = 0; first < team_steps; first += STAGE_STEPS) {
        ring.wait(stage);
        wait_for_team<G::TEAM_THREADS>(team);  // what all copied of this stage has come, and the one before has been read by all
        const int next = first + (stages - 1) * STAGE_STEPS;
        if (next < team_steps) {
            ring.copy_weights(next_stage, next);
            ring.copy_activations(next_stage, next);
        }
        ring.commit();
        const unsigned weights = first_stage + stage * G::STAGE_BYTES;
        next_stage = stage;
        stage = stage + 1 == stages ? 0 : stage + 1;
#pragma unroll
        for (int step = 0; step < STAGE_STEPS; ++step) {
            if (first + step >= team_steps) break;
            const unsigned lane = weights + lane_offset(step);
            multiply<T, G>(sum, lane, lane + G::WEIGHT_ROWS * ROW_BYTES, column_warp);
            if (++slice_step < shares.steps) continue;
            slice_step = 0;
            for_each_sum<G>([&](int r, int c, int i) { part[r][c][i] += sum[r][c][i], sum[r][c][i] = 0.f; });
            summed += shares.steps;
            if (summed != item_steps || summed == team_steps) continue;  // not the first of two items
            leave<G>(part, first_area, column_warp);
            for_each_sum<G>([&](int r, int c, int i) { part[r][c][i] = 0.f; });
        }
    }
}

// Adds the slices of each group of the block; the sum goes to the last area of the group's first team.
template <typename G> __device__ __forceinline__ void join_slices(const Shares<G>& shares, char* shared, int batch) {
    constexpr int QUADS = G::WEIGHT_ROWS / 4;
    const int group_teams = shares.group_teams(), quads = batch * QUADS;
    const bool leaves_two = shares.items() > 1;
    for (int i = threadIdx.x; i < G::TEAMS / group_teams * quads; i += TILED_THREADS) {
        const int first = i / quads * group_teams, place = (i % quads / QUADS * G::AREA_STRIDE + i % QUADS * 4) * 4;
        float4 group = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int team = 0; team < G::TEAMS; ++team) {
            if (team >= group_teams) continue;
            const int first_area = shares.first_area(first + team), last_area = shares.last_area(first + team);
            if (leaves_two) add_to(group, *reinterpret_cast<const float4*>(shared + first_area + place));
            add_to(group, *reinterpret_cast<const float4*>(shared + last_area + place));
        }
        *reinterpret_cast<float4*>(shared + shares.last_area(first) + place) = group;
    }
}

// What becomes of four sums of row b, from column n on, whose parts `read` returns.
template <typename T, typename G, typename Output, typename Read>
__device__ __forceinline__ void finish(
    const Output& output, const T* bias, int b, int n, int rows, const float4& before, bool in_fours, const Read& read) {
    float4 total[G::SUMS], values[G::SUMS][GROUPS];
#pragma unroll
    for (int s = 0; s < G::SUMS; ++s)
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) values[s][g] = read(s, g);
#pragma unroll
    for (int s = 0; s < G::SUMS; ++s) {
        total[s] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) add_to(total[s], values[s][g]);
        if (bias == nullptr) continue;
        const auto own = [&](int i) { return n + i < rows ? to_float(bias[s * rows + n + i]) : 0.f; };
        add_to(total[s], make_float4(own(0), own(1), own(2), own(3)));
    }
    if (in_fours) return write_four(output, b, n, rows, total, before);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float one[G::SUMS];
#pragma unroll
        for (int s = 0; s < G::SUMS; ++s)
            one[s] = i == 0 ? total[s].x : i == 1 ? total[s].y : i == 2 ? total[s].z : total[s].w;
        if (n + i < rows) output(b, n + i, rows, one, output.before(b, n + i, rows));
    }
}

// steps: of a slice. stages: 2 to MOST_STAGES. Grid (tiles, splits) in clusters of (1, splits); splits 1, 2 or 4. Dynamic
// shared memory, each once a team: the rings, whose memory also takes an area; another area where a team leaves two items;
// MOST_STAGES barriers of 8 bytes.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void multiply_tile(
    const TensorMap* weight_map, const TensorMap* input_map, const Operands<T>& operands, const T* bias,
    const Output& output, int steps, int stages) {
    extern __shared__ __align__(1024) char shared[];
    if (STAGE_STEPS == 2 && shared_address(shared) % 1024 != 0) __trap();  // the accelerator would swizzle otherwise
    const Shares<G> shares(steps, stages);
    const int team = threadIdx.x / G::TEAM_THREADS, column_warp = threadIdx.x % G::TEAM_THREADS / 32;
    const int splits = shares.splits, batch = operands.batch, rows = operands.rows, team_steps = shares.team_steps();

    launch_next_kernel();
    Ring<T, G> ring(weight_map, input_map, operands, shared + shares.last_area(team), shared + shares.barriers(team),
                    (shares.rank * G::TEAMS + team) * team_steps * 32, stages);
    for (int stage = 0; stage < stages - 1; ++stage)
        if (stage * STAGE_STEPS < team_steps) ring.copy_weights(stage, stage * STAGE_STEPS);
    ring.commit();
    wait_for_previous_kernel();
    for (int stage = 0; stage < stages - 1; ++stage) {
        if (stage * STAGE_STEPS < team_steps) ring.copy_activations(stage, stage * STAGE_STEPS);
        ring.commit();
    }
    Sums<G> part = {};
    float* first_area = reinterpret_cast<float*>(shared + shares.first_area(team));
    const unsigned base = shared_address(shared);
    multiply_part<T, G>(part, ring, shares, base + shares.last_area(team), first_area, team, column_warp, stages);

    constexpr int QUADS = G::UNIT / 4;  // of a row, four outputs each
    const bool in_fours = rows % 4 == 0;
    const auto quad = [&](int first, int k) { return first + (k * splits + shares.rank) * TILED_THREADS + threadIdx.x; };
    const auto row_of = [&](int quad) { return quad / QUADS; };
    const auto column_of = [&](int quad) { return quad % QUADS * 4; };
    float4 before[AT_ONCE];
    const auto read_residuals = [&](int first) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int b = row_of(quad(first, k)), n = blockIdx.x * G::UNIT + column_of(quad(first, k));
            if (in_fours && b < batch && n < rows) before[k] = read_before(output, b, n, rows);
        }
    };
    read_residuals(0);
    wait_for_team<G::TEAM_THREADS>(team);  // the ring has been read by all: it takes the last sums
    leave<G>(part, reinterpret_cast<float*>(shared + shares.last_area(team)), column_warp);
    if (shares.of_slices()) {
        __syncthreads();
        join_slices(shares, shared, batch);
    }
    unsigned areas[GROUPS];
    const int own_groups = GROUPS / splits;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
        areas[g] = address_in_block(base, g / own_groups) + shares.group_area(g % own_groups);
    if (splits > 1) cluster_barrier();
    else __syncthreads();
    for (int first = 0; first < batch * QUADS; first += AT_ONCE * splits * TILED_THREADS) {
        if (first > 0) read_residuals(first);
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int b = row_of(quad(first, k)), column = column_of(quad(first, k)), n = blockIdx.x * G::UNIT + column;
            if (b >= batch || n >= rows) continue;
            finish<T, G>(output, bias, b, n, rows, before[k], in_fours, [&](int s, int g) {
                return read_cluster(areas[g] + (b * G::AREA_STRIDE + s * G::UNIT + column) * 4);
            });
        }
    }
    if (splits > 1) cluster_barrier();  // others have read what this block left
}

// What the kernels take beside tensor maps. input: of T, rows `stride` elements apart; output: float, or T of gates and ups.
struct TiledLinear {
    Linear linear;
    Kept kept;
    const void *input, *residual;
    void* output;
    int stride, stages, residual_float, activation;
};
static_assert(sizeof(TiledLinear) == HOST_TILED_LINEAR_BYTES, "as the host's structure");

template <typename T, typename G, typename Output>
__device__ __forceinline__ void multiply_with(
    const TensorMap* weight_map, const TensorMap* input_map, const TiledLinear& arguments, const Output& output) {
    const Linear& linear = arguments.linear;
    const Operands<T> operands{
        static_cast<const T*>(linear.weight), static_cast<const T*>(arguments.input), arguments.stride, linear.batch,
        linear.rows, linear.columns};
    const T* bias = static_cast<const T*>(linear.bias);
    multiply_tile<T, G>(weight_map, input_map, operands, bias, output, linear.steps, arguments.stages);
}

// output = scale (input weight^T + bias)
template <typename T, int ROWS, int WEIGHT_ROWS, int TEAMS, int BLOCKS>
__global__ void __launch_bounds__(TILED_THREADS, BLOCKS) linear(
    const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap input_map,
    const __grid_constant__ TiledLinear arguments) {
    const FloatOutput output{static_cast<float*>(arguments.output), arguments.linear.scale};
    multiply_with<T, Geometry<ROWS, WEIGHT_ROWS, TEAMS, BLOCKS, false>>(&weight_map, &input_map, arguments, output);
}

// output = activation(gate) up of input weight^T + bias
template <typename T, int ROWS, int WEIGHT_ROWS, int TEAMS, int BLOCKS>
__global__ void __launch_bounds__(TILED_THREADS, BLOCKS) gate_up(
    const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap input_map,
    const __grid_constant__ TiledLinear arguments) {
    const GatedOutput<T> output{static_cast<T*>(arguments.output), arguments.activation};
    multiply_with<T, Geometry<ROWS, WEIGHT_ROWS, TEAMS, BLOCKS, true>>(&weight_map, &input_map, arguments, output);
}

// output = residual + scale (input weight^T + bias)
template <typename T, int ROWS, int WEIGHT_ROWS, int TEAMS, int BLOCKS>
__global__ void __launch_bounds__(TILED_THREADS, BLOCKS) linear_residual(
    const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap input_map,
    const __grid_constant__ TiledLinear arguments) {
    const ResidualOutput<T> output{
        static_cast<float*>(arguments.output), arguments.linear.scale, arguments.residual,
        arguments.residual_float != 0, {nullptr, 0}, static_cast<T*>(arguments.kept.target), arguments.kept.stride};
    multiply_with<T, Geometry<ROWS, WEIGHT_ROWS, TEAMS, BLOCKS, false>>(&weight_map, &input_map, arguments, output);
}

}  // namespace tiled
}  // namespace decode
