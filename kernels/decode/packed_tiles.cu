// Linear layers over packed weights, of many rows of activations: warps share activations, which come from the second-level
// cache once for all weight rows of a block.
//
// The sums are those of packed_linear.cu, and so of the dense kernels. What differs is who multiplies what: the warps of a
// team have weight rows of their own and the same part of K; a block's teams have parts of K: all, a group of slices each,
// or a slice. Blocks take a part of the rows of activations: the squarer a tile is, the less comes from the cache.
#include "decode/packed_tiles.cuh"

namespace decode {
namespace packed {

// What of a warp's sums has ended: groups where it has all of K, in order.
template <typename G> struct TileTotal {
    Sums<G> sum = {};
    __device__ explicit TileTotal(char*) {}
    __device__ void add(Sums<G>& group, int) {
        add_to<G>(sum, group);
    }
    __device__ void take(Sums<G>& target) {
        for_each_sum<G>([&](int m, int t, int i) { target[m][t][i] = sum[m][t][i], sum[m][t][i] = 0.f; });
    }
};
template <typename G> struct SharedTileTotal {
    float4* own;  // [WEIGHT_TILES, TOKEN_TILES, THREADS], of the thread
    __device__ explicit SharedTileTotal(char* area) : own(reinterpret_cast<float4*>(area) + threadIdx.x) {}
    __device__ void add(Sums<G>& group, int groups) {
#pragma unroll
        for (int m = 0; m < G::WEIGHT_TILES; ++m)
#pragma unroll
            for (int t = 0; t < G::TOKEN_TILES; ++t) {
                float(&one)[4] = group[m][t];
                float4& place = own[(m * G::TOKEN_TILES + t) * G::THREADS];
                float4 before = groups == 0 ? make_float4(0.f, 0.f, 0.f, 0.f) : place;
                before.x += one[0], before.y += one[1], before.z += one[2], before.w += one[3];
                place = before;
                one[0] = one[1] = one[2] = one[3] = 0.f;
            }
    }
    __device__ void take(Sums<G>& target) {
#pragma unroll
        for (int m = 0; m < G::WEIGHT_TILES; ++m)
#pragma unroll
            for (int t = 0; t < G::TOKEN_TILES; ++t) {
                const float4 one = own[(m * G::TOKEN_TILES + t) * G::THREADS];
                target[m][t][0] = one.x, target[m][t][1] = one.y, target[m][t][2] = one.z, target[m][t][3] = one.w;
            }
    }
};
// Writes a warp's sums, of a tile whose outputs begin at column `first`: lanes of two neighbouring weight rows exchange
// sums, so that each has two columns of one row of activations.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void write_own(const Sums<G>& total, const Linear& linear, const Output& output, int first) {
    constexpr int HALVES = 2 / G::SUMS, AT_ONCE = G::WEIGHT_TILES == 1 ? 4 : 2;
    const T* bias = static_cast<const T*>(linear.bias);
    const bool odd = own_row() % 2;
    float2 before[AT_ONCE][G::WEIGHT_TILES][HALVES];
#pragma unroll
    for (int part = 0; part < G::TOKEN_TILES; part += AT_ONCE) {
        const auto for_each = [&](bool writes) {
#pragma unroll
            for (int t = part; t < part + AT_ONCE && t < G::TOKEN_TILES; ++t)
#pragma unroll
                for (int m = 0; m < G::WEIGHT_TILES; ++m)
#pragma unroll
                    for (int half = 0; half < HALVES; ++half) {
                        const int b = first_token<G>() + t * 8 + own_quad() * 2 + odd;
                        const int n = first + (m * HALVES + half) * 8 + own_row() / 2 * 2;
                        const bool exists = b < linear.batch && n < linear.rows;
                        float2& own = before[t - part][m][half];
                        if (!writes) {
                            if (exists) own = output.before_two(b, n, linear.rows);
                            continue;
                        }
                        float2 sums[G::SUMS];
#pragma unroll
                        for (int s = 0; s < G::SUMS; ++s) {
                            const float one = total[m][t][2 * (half + s)], two = total[m][t][2 * (half + s) + 1];
                            const float other = __shfl_xor_sync(FULL_WARP, odd ? one : two, 4);
                            sums[s] = odd ? make_float2(other, two) : make_float2(one, other);
                        }
                        if (!exists) continue;
#pragma unroll
                        for (int s = 0; s < G::SUMS; ++s) {
                            if (bias == nullptr) continue;
                            const float2 added = read_two(bias + s * linear.rows + n, n, linear.rows);
                            sums[s].x += added.x, sums[s].y += added.y;
                        }
                        output.two(b, n, linear.rows, sums, own);
                    }
        };
        for_each(false);
        for_each(true);
    }
}

template <typename G> __device__ __forceinline__ void leave_sums(float* area, const Sums<G>& sums) {
    const int team = own_warp() / G::ROW_WARPS, rows = own_warp() % G::ROW_WARPS * 16 * G::WEIGHT_TILES;
    float* own = area + team * G::PLACES + rows + own_row();
#pragma unroll
    for (int t = 0; t < G::TOKEN_TILES; ++t)
#pragma unroll
        for (int m = 0; m < G::WEIGHT_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                own[(t * 8 + own_quad() * 2 + i % 2) * G::STRIDE + m * 16 + i / 2 * 8] = sums[m][t][i];
}

// Grid (blocks, parts of the rows of activations); the blocks walk over the tiles.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void multiply_tiles(const TiledLinear& arguments, const Output& output) {
    extern __shared__ __align__(16) char shared[];
    const Linear& linear = arguments.linear;
    int* begins = reinterpret_cast<int*>(shared);
    float* area = reinterpret_cast<float*>(shared + G::AREA_BEGIN);
    const int tiles = (linear.rows + G::UNIT - 1) / G::UNIT;
    const int own_tiles = (tiles - static_cast<int>(blockIdx.x) + gridDim.x - 1) / gridDim.x;

    const int first = own_warp() / G::ROW_WARPS * G::OWN_BLOCKS;

    launch_next_kernel();
    Weights<G, unsigned> weights(
        linear, tiles, G::OWN_BLOCKS, shared_address(shared + G::RINGS_BEGIN), [=](int) { return first; });
#pragma unroll
    for (int i = 0; i < G::DEPTH; ++i) {
        weights.copy();
        commit_copies();
    }
    wait_for_previous_kernel();
    if (threadIdx.x < 8 * G::TOKEN_TILES) {
        const SelectedRows source{arguments.selected, arguments.tokens};
        const int b = first_token<G>() + static_cast<int>(threadIdx.x);
        begins[threadIdx.x] = source(min(b, linear.batch - 1)) * arguments.stride;
    }
    __syncthreads();
    TeamActivations<T, G> activations(
        arguments, begins, first * BLOCK_COLUMNS, own_tiles, shared_address(shared + G::INPUT_BEGIN));
    if constexpr (G::STAYS) {
#pragma unroll 1
        for (int i = 0; i < activations.CHUNKS; ++i) activations.copy();
        commit_copies();
    } else {
#pragma unroll
        for (int i = 0; i < G::STAGES - 1; ++i) {
            activations.copy();
            commit_copies();
        }
    }
    JoinedOutputs<T, G, false, Output> outputs(linear, output);
    if (outputs.EARLY) outputs.read(blockIdx.x * G::UNIT);
    wait_for_copies<G::STAYS ? 0 : G::STAGES - 2>();
    wait_for_warps<G>();
    const unsigned mask = linear.batch > 0 ? LOW : 0;  // for the compiler no constant, of which it would make many copies
    unsigned slot = weights.ring, place = activations.memory;
    Held<G> held;
    uint4 rows[2][G::TOGETHER];  // what is multiplied, and what is read meanwhile
    held.read(slot);
    read_rows<G>(rows[0], place, 0);
    typename Choose<G::LEAVES_TOTAL, SharedTileTotal<G>, TileTotal<G>>::type total(shared + G::AREA_BEGIN);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        Sums<G> sum = {}, group = {};
        if (outputs.EARLY && tile != blockIdx.x) outputs.read(tile * G::UNIT);
        int steps_left = G::STEPS, slices = 0;
#pragma unroll 1
        for (int block = 0; block < G::OWN_BLOCKS; ++block) {
            Group<T, G::MODE> groups[G::TILES];
#pragma unroll
            for (int d = 0; d < BLOCK_STEPS; ++d) {
                const bool last_step = d == BLOCK_STEPS - 1;
                if (G::STAYS && last_step) {
                    wait_for_copies<G::STAYS ? G::DEPTH - 2 : 0>();
                    __syncwarp();  // other lanes' scales have come, and those before have been read
                } else if (!G::STAYS && (d + 1) % G::CHUNK == 0) {
                    wait_for_copies<G::STAYS ? 0 : G::STAGES - 3>();
                    wait_for_warps<G>();  // the next chunk has come, and the one before this one has been read
                    activations.copy();
                }
                if (last_step) {
                    weights.copy();  // where the block lay that is in registers
                    slot = weights.following(slot);
                }
                if (last_step || (!G::STAYS && (d + 1) % G::CHUNK == 0)) commit_copies();
                const unsigned following = activations.following(place);
#pragma unroll
                for (int i = 0; i < G::TILES; ++i) held.tiles[i].begin(groups[i], d, mask);
                const bool new_slice = G::EVERY == G::STEPS && d % G::STEPS == 0;
                unsigned low[G::WEIGHT_TILES][4], high[G::WEIGHT_TILES][4];
#pragma unroll
                for (int m = 0; m < G::WEIGHT_TILES; ++m) {
                    held.tiles[2 * m].values(groups[2 * m], d, mask, low[m]);
                    held.tiles[2 * m + 1].values(groups[2 * m + 1], d, mask, high[m]);
                }
                if (last_step) held.read(slot);
                constexpr int PARTS = G::TOKEN_TILES / G::TOGETHER;
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    const uint4(&now)[G::TOGETHER] = rows[(d * PARTS + part) % 2];
                    const bool last = part + 1 == PARTS;
                    const int next = last ? 0 : (part + 1) * G::TOGETHER;
                    read_rows<G>(rows[(d * PARTS + part + 1) % 2], last ? following : place, next);
#pragma unroll
                    for (int half = 0; half < 2; ++half)
#pragma unroll
                        for (int m = 0; m < G::WEIGHT_TILES; ++m) {
                            const unsigned a0[2] = {low[m][2 * half], high[m][2 * half]};
                            const unsigned a2[2] = {low[m][2 * half + 1], high[m][2 * half + 1]};
#pragma unroll
                            for (int t = 0; t < G::TOGETHER; ++t)
                                multiply_add(sum[m][part * G::TOGETHER + t], a0, a2, half == 0 ? now[t].x : now[t].z,
                                             half == 0 ? now[t].y : now[t].w, half == 0 && new_slice, T());
                        }
                }
                place = following;
                if (G::K_WARPS == SLICES || (d + 1) % G::EVERY != 0) continue;
                steps_left -= G::EVERY;
                if (G::EVERY != G::STEPS && steps_left > 0) continue;
                steps_left = G::STEPS;
                for_each_sum<G>([&](int m, int t, int i) {
                    group[m][t][i] += sum[m][t][i];
                    if (G::EVERY != G::STEPS) sum[m][t][i] = 0.f;
                });
                if (G::ALL && ++slices % SLICES_OF_A_GROUP == 0) total.add(group, slices / SLICES_OF_A_GROUP - 1);
            }
        }
        if constexpr (G::ALL) {
            total.take(group);
            write_own<T, G>(group, linear, output, tile * G::UNIT + own_warp() % G::ROW_WARPS * G::WARP_UNIT);
            continue;
        }
        __syncthreads();  // the area has been read
        leave_sums<G>(area, G::K_WARPS == SLICES ? sum : group);
        if (!outputs.EARLY) outputs.read(tile * G::UNIT);
        __syncthreads();
        outputs.write(area, nullptr, tile * G::UNIT);
    }
}

#define TILES_KERNEL(NAME)                                                                                             \
    template <typename T, int TOKEN_TILES, int WEIGHT_TILES, int ROW_WARPS, int K_WARPS, int DEPTH,        \
              int STAGES, int CHUNK, int STEPS, int SCALES, int MODE, int BLOCKS>                                      \
    __global__ void __launch_bounds__(32 * ROW_WARPS * K_WARPS, BLOCKS) NAME(const __grid_constant__ TiledLinear arguments)
#define TILES_GEOMETRY(PAIRED)                                                                                         \
    TileGeometry<TOKEN_TILES, WEIGHT_TILES, ROW_WARPS, K_WARPS, DEPTH, STAGES, CHUNK, STEPS, SCALES, MODE, PAIRED>

// output = scale (input weight^T + bias)
TILES_KERNEL(tiles_linear) {
    const FloatOutput output = float_output(arguments.output, arguments.linear);
    multiply_tiles<T, TILES_GEOMETRY(false)>(arguments, output);
}

// output = activation(gate) up of input weight^T + bias
TILES_KERNEL(tiles_gate_up) {
    const GatedOutput<T> output{static_cast<T*>(arguments.output), arguments.activation};
    multiply_tiles<T, TILES_GEOMETRY(true)>(arguments, output);
}

// output = residual + scale (input weight^T + bias), of the rows of input and residual that are selected, or of all
TILES_KERNEL(tiles_linear_residual) {
    multiply_tiles<T, TILES_GEOMETRY(false)>(arguments, residual_output<T>(arguments));
}
#undef TILES_KERNEL
#undef TILES_GEOMETRY

}  // namespace packed
}  // namespace decode
