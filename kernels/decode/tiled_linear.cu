// Linear layers of up to 64 rows of activations, as trees have that are verified: tiles of weight rows times all rows
// of activations.
//
// Every sum has the order of linear.cu: slices of K from zero, four slices a group, then the groups. So a row gets
// the bits of the decode step. A warp has its own 16 or 32 rows of activations and weight rows, for all of K, and keeps
// its sums in registers: of the slice, of the group, and in all. Blocks stay: each walks over its tiles, and the next
// tile's weights are copied while the sums of the last one are written. Where a GPU has many more multiprocessors than
// there are tiles, the four blocks of a cluster share a tile; each takes a group of slices.
#include "shared/clusters.cuh"
#include "decode/many_rows.cuh"
#include "decode/tiled_ring.cuh"
#include "decode/tiled_sums.cuh"

namespace decode {
namespace tiled {

constexpr int AT_ONCE = 8;  // outputs of a thread that are made of what the blocks of a cluster left

// Tiles of a warp: ROW_TILES of 16 rows of activations, COLUMN_TILES of 8 weight rows; ROW_WARPS beside each other have
// the rows. BLOCKS on a multiprocessor. PAIRED: the second half of a tile's weight rows holds up rows, `rows` below the
// gate rows in the first half; every second column tile of a warp is of them. ADAPTED: with LoRA adapters, whose rows
// of A are tiles like others.
template <int ROW_TILES_, int COLUMN_TILES_, int ROW_WARPS_, int BLOCKS_, bool PAIRED_, bool ADAPTED_> struct Geometry {
    static constexpr int ROW_TILES = ROW_TILES_, COLUMN_TILES = COLUMN_TILES_, ROW_WARPS = ROW_WARPS_, BLOCKS = BLOCKS_;
    static constexpr bool PAIRED = PAIRED_, ADAPTED = ADAPTED_;
    static constexpr int ROWS = 16 * ROW_TILES * ROW_WARPS, WEIGHT_ROWS = 8 * COLUMN_TILES * (TILED_WARPS / ROW_WARPS);
    static constexpr int SUMS = PAIRED ? 2 : 1;      // that an output is made of
    static constexpr int UNIT = WEIGHT_ROWS / SUMS;  // output columns of a tile
    static constexpr int STAGE_BYTES = (WEIGHT_ROWS + ROWS) * ROW_BYTES;
    static constexpr int AREA_STRIDE = WEIGHT_ROWS + 4;  // floats of a row that a block leaves; against bank conflicts
    // Whether a thread's registers hold the next step's fragments beside this one's, and its sums of three kinds.
    static constexpr int SUM_REGISTERS = 12 * ROW_TILES * COLUMN_TILES, FRAGMENT = 8 * ROW_TILES + 4 * COLUMN_TILES;
    static constexpr int ROOM = (BLOCKS == 1 ? 180 : 64) - SUM_REGISTERS - 2 * FRAGMENT;
    static constexpr bool AHEAD = ROOM >= 0, EARLY_B = ROOM >= 4 * COLUMN_TILES;  // or rows of adapters' B
    static_assert(COLUMN_TILES % SUMS == 0 && STAGE_BYTES % 1024 == 0, "pairs of tiles; where swizzling begins");
    static constexpr int AREA = ROWS * AREA_STRIDE;      // floats that a block leaves, and as many of what adapters add
    static_assert(2 * STAGE_BYTES >= AREA * 4, "two stages take what a block leaves");

    // Pieces of four of adapters' products, which lie behind the ring.
    static constexpr int PRODUCTS = SUMS * ROWS * 4;

    static __device__ constexpr int ring_bytes(int stages) { return stages * (STAGE_BYTES + BARRIER_BYTES); }
    static __device__ constexpr int shared_bytes(int stages) { return ring_bytes(stages) + ADAPTED * ROWS * 64; }
};
static_assert(Geometry<1, 2, 1, 2, false, false>::shared_bytes(3) == HOST_SMALL_BYTES &&
                  Geometry<2, 6, 2, 1, true, true>::shared_bytes(2) == HOST_LARGE_BYTES,
              "the host gives a block its shared memory");

// What a warp multiplies in a step of 32 columns.
template <typename G> struct Fragments {
    uint4 weights[G::COLUMN_TILES], activations[G::ROW_TILES][2];

    __device__ void read(unsigned stage, const Lane<G>& lane, int step) {
        const unsigned own = stage + lane_offset(step), rows = own + (G::WEIGHT_ROWS + lane.row) * ROW_BYTES;
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; ++c) weights[c] = read_shared_16(own + lane.tile_row(c) * ROW_BYTES);
#pragma unroll
        for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                activations[r][half] = read_shared_16(rows + (r * 16 + half * 8) * ROW_BYTES);
    }
    // Products of one sum stand as far apart as they can: each waits for the one before.
    template <typename T> __device__ void multiply(Sums<G>& sum, T) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int r = 0; r < G::ROW_TILES; ++r) {
                const uint4 &low = activations[r][0], &high = activations[r][1];
                const unsigned a0[2] = {half == 0 ? low.x : low.z, half == 0 ? high.x : high.z};
                const unsigned a2[2] = {half == 0 ? low.y : low.w, half == 0 ? high.y : high.w};
#pragma unroll
                for (int c = 0; c < G::COLUMN_TILES; ++c) {
                    const uint4& b = weights[c];
                    multiply_add(sum[r][c], a0, a2, half == 0 ? b.x : b.z, half == 0 ? b.y : b.w, T());
                }
            }
    }
};

// A warp's sums over the columns of a tile. steps: of a slice.
template <typename T, typename G, typename Chunks>
__device__ __forceinline__ void multiply_tile(
    Sums<G>& total, Chunks& chunks, const Lane<G>& lane, int count, int steps) {
    Sums<G> sum = {}, group = {};
    int slice_step = 0, slice = 0;
    const auto end_step = [&] {
        if (++slice_step < steps) return;
        slice_step = 0;
        add_to<G>(group, sum);
        if (++slice % SLICES_OF_A_GROUP == 0) add_to<G>(total, group);
    };
    static_assert(STAGE_STEPS == 2, "a chunk is multiplied in two steps");
    if constexpr (G::AHEAD) {  // of a chunk the first step is read while the last one of the chunk before is multiplied
        Fragments<G> first, second;
        const auto start_chunk = [&] {
            chunks.wait();
            first.read(chunks.ring.place(), lane, 0);
            chunks.refill();
        };
        if (count > 0) start_chunk();
        for (int chunk = 1; chunk <= count; ++chunk) {
            second.read(chunks.ring.place(), lane, 1);
            first.multiply(sum, T());
            end_step();
            chunks.release();
            if (chunk < count) start_chunk();
            second.multiply(sum, T());
            end_step();
        }
    } else {
        for (int chunk = 0; chunk < count; ++chunk) {
            chunks.wait();
            chunks.refill();
#pragma unroll
            for (int step = 0; step < STAGE_STEPS; ++step) {
                Fragments<G> fragments;
                fragments.read(chunks.ring.place(), lane, step);
                if (step == STAGE_STEPS - 1) chunks.release();
                fragments.multiply(sum, T());
                end_step();
            }
        }
    }
    add_to<G>(group, sum);  // of a slice, and of a group, that ends with the columns
    add_to<G>(total, group);
}

// What becomes of a thread's sums.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void write(
    const Sums<G>& total, const Lane<G>& lane, const T* bias, const Output& output, int first, int batch, int rows) {
    float before[G::ROW_TILES][G::COLUMN_TILES / G::SUMS][4];  // is read as a whole before anything is written
    const auto exists = [&](int r, int c, int i) {
        return c % G::SUMS == 0 && lane.row_of(r, i) < batch && first + lane.weight_row_of(c, i) < rows;
    };
    for_each_sum<G>([&](int r, int c, int i) {
        if (exists(r, c, i))
            before[r][c / G::SUMS][i] = output.before(lane.row_of(r, i), first + lane.weight_row_of(c, i), rows);
    });
    for_each_sum<G>([&](int r, int c, int i) {
        if (!exists(r, c, i)) return;
        const int n = first + lane.weight_row_of(c, i);
        float one[G::SUMS];
#pragma unroll
        for (int s = 0; s < G::SUMS; ++s) {
            one[s] = total[r][c + s][i];
            if (bias != nullptr) one[s] += to_float(bias[s * rows + n]);
        }
        output(lane.row_of(r, i), n, rows, one, before[r][c / G::SUMS][i]);
    });
}

// The same of a tile that the blocks of a cluster share: each leaves its sums in shared memory, and writes a part of
// the outputs, for which it reads the sums of all; the last block also leaves what adapters add, which know the layer's
// rows behind `first_row` others. All threads call it.
template <typename T, typename G, typename Adapters, typename Output>
__device__ __forceinline__ void join(
    const Sums<G>& total, const Lane<G>& lane, float* area, const T* bias, const Output& output, Adapters& adapters,
    int tile, int batch, int rows, int first_row) {
    const bool has_outputs = tile >= 0 && tile * G::UNIT < rows;
    __syncthreads();  // the ring, whose memory takes the sums, has been read by all
    leave<G>(area, total, lane);
    if constexpr (G::ADAPTED)
        if (has_outputs && blockIdx.y == GROUPS - 1) {
            Sums<G> added = {};
            adapters.add(added, first_row + tile * G::UNIT);
            leave<G>(area + G::AREA, added, lane);
        }
    cluster_barrier();
    unsigned areas[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) areas[g] = address_in_block(shared_address(area), g);
    const int own = blockIdx.y * TILED_THREADS + threadIdx.x, first = tile * G::UNIT;
    if constexpr (G::ADAPTED)
        if (tile < 0) leave_joined<T, G>(adapters, areas, ~tile * G::WEIGHT_ROWS, own, batch);
    for (int place = own; has_outputs && place < batch * G::UNIT; place += AT_ONCE * GROUPS * TILED_THREADS) {
        float before[AT_ONCE], values[AT_ONCE][G::SUMS][GROUPS + G::ADAPTED];
        const auto place_of = [&](int k) { return place + k * GROUPS * TILED_THREADS; };
        const auto exists = [&](int k) {
            return place_of(k) < batch * G::UNIT && first + place_of(k) % G::UNIT < rows;
        };
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            if (!exists(k)) continue;
            const int b = place_of(k) / G::UNIT, column = place_of(k) % G::UNIT;
            before[k] = output.before(b, first + column, rows);
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s) {
                const unsigned at = (b * G::AREA_STRIDE + s * G::UNIT + column) * 4;
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) values[k][s][g] = read_cluster(areas[g] + at);
                if constexpr (G::ADAPTED) values[k][s][GROUPS] = read_cluster(areas[GROUPS - 1] + G::AREA * 4 + at);
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            if (!exists(k)) continue;
            const int n = first + place_of(k) % G::UNIT;
            float one[G::SUMS] = {};
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s) {
#pragma unroll
                for (int g = 0; g < GROUPS + G::ADAPTED; ++g) one[s] += values[k][s][g];
                if (bias != nullptr) one[s] += to_float(bias[s * rows + n]);
            }
            output(place_of(k) / G::UNIT, n, rows, one, before[k]);
        }
    }
    cluster_barrier();  // others have read what this block left
}

template <typename T, typename G, bool MAPPED> struct ChunksOf { using type = Copies<T, G, SelectedRows>; };
#if __CUDA_ARCH__ >= 900
template <typename T, typename G> struct ChunksOf<T, G, true> { using type = Accelerator<T, G, SelectedRows>; };
#endif

// Grid (blocks, 1), which walk over the tiles, or (tiles, those of A included, 4) in clusters of (1, 4). Dynamic shared
// memory: the ring and its barriers. MAPPED: rows are not selected, so that tensor maps, where a GPU has them, tell
// where activations are.
template <typename T, typename G, bool MAPPED, typename Output>
__device__ __forceinline__ void multiply(
    const TensorMap* weight_map, const TensorMap* input_map, const TensorMap* low_map, const TiledLinear& arguments,
    const Output& output) {
    extern __shared__ __align__(1024) char shared[];
    if (shared_address(shared) % 1024 != 0) __trap();  // the accelerator would swizzle otherwise
    const Linear& linear = arguments.linear;
    const int batch = linear.batch, rows = linear.rows, columns = linear.columns;
    const bool shares = gridDim.y > 1;
    const int first_column = blockIdx.y * SLICES_OF_A_GROUP * linear.steps * 32;
    const int own_columns = shares ? min(columns - first_column, SLICES_OF_A_GROUP * linear.steps * 32) : columns;
    char* behind_ring = shared + G::ring_bytes(arguments.stages);
    typename AdaptersOf<T, G, G::ADAPTED>::type adapters(linear.adapters, batch, linear.width, behind_ring);
    const int chunks_of_tile = max(own_columns + STAGE_COLUMNS - 1, 0) / STAGE_COLUMNS;
    Work work{(rows + G::UNIT - 1) / G::UNIT, first_column, chunks_of_tile, shares};
    int low_rows = 0;
    if constexpr (G::ADAPTED) {
        adapters.fetch_scales();
        low_rows = adapters.all_low_rows();
        work.low_tiles = (low_rows + G::WEIGHT_ROWS - 1) / G::WEIGHT_ROWS;
    }
    const T* bias = static_cast<const T*>(linear.bias);
    const Operands<T, SelectedRows> operands{
        weight_map, input_map, low_map, static_cast<const T*>(linear.weight), static_cast<const T*>(arguments.input),
        static_cast<const T*>(linear.adapters.a), arguments.stride, batch, rows, columns, low_rows,
        {arguments.selected, arguments.tokens}};

    launch_next_kernel();
    typename ChunksOf<T, G, MAPPED>::type chunks(operands, Ring(shared, G::STAGE_BYTES, arguments.stages), work);
    adapters.clear_next();
    adapters.read_scales();
    const Lane<G> lane;
    Sums<G> total = {};
    for (int tile = work.first(); tile < work.tiles; tile = work.after(tile)) {
        if constexpr (G::ADAPTED)
            if (tile >= 0 && blockIdx.y == gridDim.y - 1) adapters.begin(linear.first + tile * G::UNIT);
        multiply_tile<T, G>(total, chunks, lane, work.chunks, linear.steps);
        if (shares) break;  // a tile alone
        if constexpr (G::ADAPTED) {
            if (tile < 0) {
                leave_products<T, G>(adapters, total, lane, ~tile * G::WEIGHT_ROWS);
            } else {
                Sums<G> added = {};
                adapters.add(added, linear.first + tile * G::UNIT);
                add_to<G>(total, added);
            }
        }
        if (!G::ADAPTED || tile >= 0) write<T, G>(total, lane, bias, output, tile * G::UNIT, batch, rows);
        for_each_sum<G>([&](int r, int c, int i) { total[r][c][i] = 0.f; });
    }
    float* area = reinterpret_cast<float*>(shared);
    if (shares) join<T, G>(total, lane, area, bias, output, adapters, work.first(), batch, rows, linear.first);
}

#define TILED_KERNEL(NAME)                                                                                             \
    template <typename T, int ROW_TILES, int COLUMN_TILES, int ROW_WARPS, int BLOCKS, bool ADAPTED = false>            \
    __global__ void __launch_bounds__(TILED_THREADS, BLOCKS) NAME(                                                     \
        const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap input_map,                     \
        const __grid_constant__ TensorMap low_map, const __grid_constant__ TiledLinear arguments)

// output = scale (input weight^T + bias)
TILED_KERNEL(linear) {
    const FloatOutput output = float_output(arguments.output, arguments.linear);
    using G = Geometry<ROW_TILES, COLUMN_TILES, ROW_WARPS, BLOCKS, false, ADAPTED>;
    multiply<T, G, true>(&weight_map, &input_map, &low_map, arguments, output);
}

// output = activation(gate) up of input weight^T + bias
TILED_KERNEL(gate_up) {
    const GatedOutput<T> output{static_cast<T*>(arguments.output), arguments.activation};
    using G = Geometry<ROW_TILES, COLUMN_TILES, ROW_WARPS, BLOCKS, true, ADAPTED>;
    multiply<T, G, true>(&weight_map, &input_map, &low_map, arguments, output);
}

// output = residual + scale (input weight^T + bias)
TILED_KERNEL(linear_residual) {
    using G = Geometry<ROW_TILES, COLUMN_TILES, ROW_WARPS, BLOCKS, false, ADAPTED>;
    multiply<T, G, true>(&weight_map, &input_map, &low_map, arguments, residual_output<T>(arguments));
}

// The same of the rows of input and residual that are selected.
TILED_KERNEL(selected_residual) {
    using G = Geometry<ROW_TILES, COLUMN_TILES, ROW_WARPS, BLOCKS, false, ADAPTED>;
    multiply<T, G, false>(&weight_map, &input_map, &low_map, arguments, residual_output<T>(arguments));
}
#undef TILED_KERNEL

}  // namespace tiled
}  // namespace decode
