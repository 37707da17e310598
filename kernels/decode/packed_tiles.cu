// Linear layers over weights of 4 bits, of 9 to 64 rows of activations: warps share activations, which come from the
// second-level cache once for all weight rows of a block.
//
// The sums are those of packed_linear.cu, and so of the dense kernels. What differs is who multiplies what: ROW_WARPS warps
// have weight rows of their own and the same part of K, K_WARPS such teams have parts of K: a group of slices each, or all.
// Where tiles are few, the four blocks of a cluster have a group of slices each, and their warps a slice, or the group.
#include "shared/clusters.cuh"
#include "decode/packed_copies.cuh"

namespace decode {
namespace packed {

// A warp's tile: WEIGHT_TILES of 16 weight rows, TOKEN_TILES of 8 rows of activations. DEPTH blocks of its weights find room.
// Activations come in a ring of STAGES of CHUNK steps for each team; of 0: they are copied once, for all tiles, and stay.
// The others as `Geometry` has them.
template <int TOKEN_TILES_, int WEIGHT_TILES_, int ROW_WARPS_, int K_WARPS_, int CLUSTER_, int DEPTH_, int STAGES_, int CHUNK_,
          int EVERY_, int SCALES_, int MODE_, bool PAIRED>
struct TileGeometry {
    static constexpr int TOKEN_TILES = TOKEN_TILES_, WEIGHT_TILES = WEIGHT_TILES_, ROW_WARPS = ROW_WARPS_, K_WARPS = K_WARPS_;
    static constexpr int CLUSTER = CLUSTER_, DEPTH = DEPTH_, STAGES = STAGES_, CHUNK = CHUNK_, EVERY = EVERY_, SCALES = SCALES_;
    static constexpr int MODE = MODE_, SUMS = PAIRED ? 2 : 1, THREADS = 32 * ROW_WARPS * K_WARPS;
    static constexpr int PARTS = K_WARPS * CLUSTER;  // of K
    static constexpr bool STAYS = STAGES == 0;
    static constexpr int TILES = 2 * WEIGHT_TILES, WARP_UNIT = 16 * WEIGHT_TILES / SUMS, UNIT = WARP_UNIT * ROW_WARPS;
    static constexpr int SCALE_BYTES = 2 * SCALES * (MODE == ZEROS ? 2 : 1), PIECES = 8 * SCALE_BYTES / 16;
    static constexpr int BLOCK_BYTES = CODE_BYTES + 8 * SCALE_BYTES, SLOT_BYTES = TILES * BLOCK_BYTES;
    static constexpr int TOGETHER = TOKEN_TILES * WEIGHT_TILES <= 4 ? TOKEN_TILES : WEIGHT_TILES == 1 && TOKEN_TILES % 4 == 0 ? 4 : 2;
    static constexpr int STEP_BYTES = TOKEN_TILES * 512, CHUNK_BYTES = CHUNK * STEP_BYTES;  // of activations, a team's
    // Where a warp has all of K, its sums over the groups that have ended lie in shared memory if registers have no room.
    static constexpr bool ALL = PARTS == 1, LEAVES_TOTAL = ALL && WEIGHT_TILES * TOKEN_TILES > 8;
    static constexpr int STRIDE = 16 * WEIGHT_TILES * ROW_WARPS + 4, PLACES = 8 * TOKEN_TILES * STRIDE;  // against bank conflicts
    // Shared memory: where rows begin, rings of weights, sums, activations. A cluster's sums lie where the others lay.
    static constexpr int RINGS_BEGIN = 256, AREA_BYTES = (ALL ? LEAVES_TOTAL * 4 * WEIGHT_TILES * TOKEN_TILES * THREADS : K_WARPS * PLACES) * 4;
    static constexpr int WEIGHTS_END = RINGS_BEGIN + THREADS / 32 * DEPTH * SLOT_BYTES;
    static constexpr int AREA_BEGIN = CLUSTER > 1 ? RINGS_BEGIN : WEIGHTS_END;
    static constexpr int INPUT_BEGIN = CLUSTER > 1 ? WEIGHTS_END : WEIGHTS_END + AREA_BYTES;
    static_assert(PARTS == 1 || PARTS == GROUPS || (PARTS == SLICES && EVERY == BLOCK_STEPS), "all, a group of slices, or one");
    static_assert(CLUSTER == 1 || CLUSTER == GROUPS, "a block of a cluster has a group of slices");
    static_assert(STAYS || (STAGES >= 3 && (DEPTH - 1) * BLOCK_STEPS / CHUNK >= STAGES - 2), "weights come before activations");
    static_assert(BLOCK_STEPS % CHUNK == 0 && K_WARPS <= 4 && TOKEN_TILES <= 8, "teams have barriers, rows their places");

    static __device__ constexpr int shared_bytes(int own_steps) {
        const int end = INPUT_BEGIN + K_WARPS * (STAYS ? own_steps * STEP_BYTES : STAGES * CHUNK_BYTES);
        return CLUSTER > 1 && RINGS_BEGIN + AREA_BYTES > end ? RINGS_BEGIN + AREA_BYTES : end;
    }
};

static_assert(TileGeometry<8, 2, 2, 4, 4, 3, 5, 1, 4, 1, SMALL, false>::shared_bytes(4) == HOST_JOINED_BYTES &&
                  TileGeometry<8, 2, 8, 1, 1, 2, 0, 1, 4, 1, ZEROS, true>::shared_bytes(64) == HOST_ALL_BYTES,
              "the host gives blocks their shared memory");

__device__ __forceinline__ int own_warp() { return threadIdx.x / 32; }

// Behind which what the warps of a team have copied is seen by all of them.
template <typename G> __device__ __forceinline__ void wait_for_warps() {
    if constexpr (G::ROW_WARPS == 1) __syncwarp();
    else if constexpr (G::K_WARPS == 1) __syncthreads();
    else wait_for_team<32 * G::ROW_WARPS>(own_warp() / G::ROW_WARPS);
}

// The weights of a warp, of the block's tiles, as one stream of blocks.
template <typename G> struct TileWeights {
    const char* weight;
    unsigned codes[G::TILES], scales;  // bytes from `weight`
    int row_tiles, blocks, first, own, tile, tiles, block;  // `block`: the next one of the warp's own; others: in all
    unsigned ring, slot, scale_place;

    __device__ TileWeights(const Linear& linear, int tiles, int first, int own, unsigned memory)
        : weight(static_cast<const char*>(linear.weight)), row_tiles((linear.rows + 7) / 8),
          blocks((linear.columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS), first(first), own(own), tile(blockIdx.x), tiles(tiles),
          ring(memory + own_warp() * G::DEPTH * G::SLOT_BYTES), slot(ring) {
        const int lane = threadIdx.x % 32;
        static_assert(G::TILES * G::PIECES <= 32, "a lane copies 16 bytes of scales");
        scale_place = lane / G::PIECES * G::BLOCK_BYTES + CODE_BYTES + lane % G::PIECES * 16;
        start_tile();
    }
    // The tile of 8 rows that is the i-th of the warp's; of what lies behind the last one the last, which nobody writes.
    __device__ unsigned begin_of(int i) const {
        const int unit = (tile * G::ROW_WARPS + own_warp() % G::ROW_WARPS) * (G::WARP_UNIT / 8) + i / G::SUMS;
        const int own_tile = min(unit, row_tiles - 1) + i % G::SUMS * row_tiles;
        return (static_cast<unsigned>(own_tile) * blocks + first) * G::BLOCK_BYTES;
    }
    __device__ void start_tile() {
        const int lane = threadIdx.x % 32;
        block = 0;
#pragma unroll
        for (int i = 0; i < G::TILES; ++i) codes[i] = begin_of(i) + lane * 16;
        scales = begin_of(lane / G::PIECES % G::TILES) + CODE_BYTES + lane % G::PIECES * 16;
    }
    __device__ unsigned following(unsigned place) const {
        return place == ring + (G::DEPTH - 1) * G::SLOT_BYTES ? ring : place + G::SLOT_BYTES;
    }
    // Copies the stream's next block; zeros behind its end, and behind the last column.
    __device__ __forceinline__ void copy() {
        const bool exists = tile < tiles && first + block < blocks;
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < G::TILES; ++i) {
            copy_async_16(slot + i * G::BLOCK_BYTES + lane * 16, weight + codes[i], exists);
            codes[i] += G::BLOCK_BYTES;
        }
        if (lane < G::TILES * G::PIECES) copy_async_16(slot + scale_place, weight + scales, exists);
        scales += G::BLOCK_BYTES;
        slot = following(slot);
        if (++block < own) return;
        tile += gridDim.x;
        if (tile < tiles) start_tile();
        else block = 0;
    }
};

// The activations of a team's part of K, [steps, TOKEN_TILES, lanes, 16 bytes]: of row lane / 4 of a tile eight columns. Behind
// the last column are zeros; behind the last row any row, whose products nobody reads.
template <typename T, typename G> struct TeamActivations {
    const T* input;
    const int* begins;  // of rows, in shared memory
    int columns, first, end, column, chunks;  // `column`: of the next chunk; `chunks`: that are left to copy
    unsigned memory, bytes, target;

    __device__ TeamActivations(const TiledLinear& arguments, const int* begins, int first, int steps, int tiles, unsigned memory)
        : input(static_cast<const T*>(arguments.input)), begins(begins), columns(arguments.linear.columns),
          first(first + own_quad() * 8), end(first + steps * 32), column(this->first),
          chunks(steps / G::CHUNK * (G::STAYS ? 1 : tiles)),
          bytes(G::STAYS ? steps * G::STEP_BYTES : G::STAGES * G::CHUNK_BYTES) {
        this->memory = memory + own_warp() / G::ROW_WARPS * bytes + threadIdx.x % 32 * 16;
        target = this->memory;
    }
    // The warp's share of the next chunk; behind the last one nothing, behind a tile's last one the first.
    __device__ __forceinline__ void copy() {
        constexpr int COUNT = G::CHUNK * G::TOKEN_TILES, EACH = (COUNT + G::ROW_WARPS - 1) / G::ROW_WARPS;
        if (chunks == 0) return;
        --chunks;
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            const int i = n * G::ROW_WARPS + own_warp() % G::ROW_WARPS, own = column + i / G::TOKEN_TILES * 32;
            if (COUNT % G::ROW_WARPS != 0 && i >= COUNT) break;
            copy_async_16(target + i * 512, input + begins[i % G::TOKEN_TILES * 8 + own_row()] + own, own < columns);
        }
        column += G::CHUNK * 32;
        if (column >= end) column = first;
        target += G::CHUNK_BYTES;
        if (target == memory + bytes) target = memory;
    }
    __device__ unsigned following(unsigned place) const {
        return place + G::STEP_BYTES == memory + bytes ? memory : place + G::STEP_BYTES;
    }
};

template <typename G> __device__ __forceinline__ void read_rows(uint4 (&rows)[G::TOGETHER], unsigned place, int first) {
#pragma unroll
    for (int i = 0; i < G::TOGETHER; ++i) rows[i] = read_shared_16(place + (first + i) * 512);
}

template <typename G> using TileSums = float[G::WEIGHT_TILES][G::TOKEN_TILES][4];

template <typename G, typename Action> __device__ __forceinline__ void for_each_sum(const Action& action) {
#pragma unroll
    for (int m = 0; m < G::WEIGHT_TILES; ++m)
#pragma unroll
        for (int t = 0; t < G::TOKEN_TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) action(m, t, i);
}

// What of a warp's sums has ended: groups where it has all of K, in order.
template <typename G> struct TileTotal {
    TileSums<G> sum = {};
    __device__ explicit TileTotal(char*) {}
    __device__ void add(TileSums<G>& group, int) {
        for_each_sum<G>([&](int m, int t, int i) { sum[m][t][i] += group[m][t][i], group[m][t][i] = 0.f; });
    }
    __device__ void take(TileSums<G>& target) {
        for_each_sum<G>([&](int m, int t, int i) { target[m][t][i] = sum[m][t][i], sum[m][t][i] = 0.f; });
    }
};
template <typename G> struct SharedTileTotal {
    float4* own;  // [WEIGHT_TILES, TOKEN_TILES, THREADS], of the thread
    __device__ explicit SharedTileTotal(char* area) : own(reinterpret_cast<float4*>(area) + threadIdx.x) {}
    __device__ void add(TileSums<G>& group, int groups) {
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
    __device__ void take(TileSums<G>& target) {
#pragma unroll
        for (int m = 0; m < G::WEIGHT_TILES; ++m)
#pragma unroll
            for (int t = 0; t < G::TOKEN_TILES; ++t) {
                const float4 one = own[(m * G::TOKEN_TILES + t) * G::THREADS];
                target[m][t][0] = one.x, target[m][t][1] = one.y, target[m][t][2] = one.z, target[m][t][3] = one.w;
            }
    }
};
template <bool, typename First, typename> struct Choose { using type = First; };
template <typename First, typename Second> struct Choose<false, First, Second> { using type = Second; };

// Writes a warp's sums, of a tile whose outputs begin at column `first`: lanes of two neighbouring weight rows exchange sums, so
// that each has two columns of one row of activations.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void write_own(const TileSums<G>& total, const Linear& linear, const Output& output, int first) {
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
                        const int b = t * 8 + own_quad() * 2 + odd, n = first + (m * HALVES + half) * 8 + own_row() / 2 * 2;
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

template <int CLUSTER> __device__ __forceinline__ float2 read_two_of_cluster(unsigned address) {
    float2 value;
    if constexpr (CLUSTER > 1) value = make_float2(read_cluster(address), read_cluster(address + 4));
    else asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address));
    return value;
}

// The outputs of a tile that a thread writes where others have parts of their sums, as pairs of columns.
template <typename T, typename G, typename Output> struct JoinedOutputs {
    static constexpr int PAIRS = G::UNIT / 2, SHARE = G::THREADS * G::CLUSTER;
    static constexpr int EACH = G::ALL ? 1 : (8 * G::TOKEN_TILES * PAIRS + SHARE - 1) / SHARE;
    static constexpr bool EARLY = !G::ALL && EACH <= 2;  // registers hold what is read before the products
    const Linear& linear;
    const Output& output;
    float2 before[EACH], biases[EACH][G::SUMS];

    __device__ JoinedOutputs(const Linear& linear, const Output& output) : linear(linear), output(output) {}
    template <typename Action> __device__ __forceinline__ void for_each(int first, const Action& action) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = (i * G::CLUSTER + blockIdx.y) * G::THREADS + threadIdx.x, b = at / PAIRS, column = at % PAIRS * 2;
            if (b < linear.batch && first + column < linear.rows) action(i, b, column);
        }
    }
    __device__ __forceinline__ void read(int first) {
        const T* bias = static_cast<const T*>(linear.bias);
        for_each(first, [&](int i, int b, int column) {
            const int n = first + column;
            before[i] = output.before_two(b, n, linear.rows);
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s)
                if (bias != nullptr) biases[i][s] = read_two(bias + s * linear.rows + n, n, linear.rows);
        });
    }
    // Adds the groups' sums in order, of areas [rows of activations, STRIDE]: one behind the other, or one in each block.
    __device__ __forceinline__ void write(const float* area, int first) const {
        unsigned areas[GROUPS];
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
            areas[g] = G::CLUSTER == 1 ? shared_address(area + g * G::PLACES) : address_in_block(shared_address(area), g);
        for_each(first, [&](int i, int b, int column) {
            float2 sums[G::SUMS];
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s) {
                const int place = b * G::STRIDE + (G::SUMS == 1 ? column : column / 8 * 16 + column % 8 + s * 8);
                sums[s] = make_float2(0.f, 0.f);
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
                    const float2 one = read_two_of_cluster<G::CLUSTER>(areas[g] + place * 4);
                    sums[s].x += one.x, sums[s].y += one.y;
                }
                if (linear.bias != nullptr) sums[s].x += biases[i][s].x, sums[s].y += biases[i][s].y;
            }
            output.two(b, first + column, linear.rows, sums, before[i]);
        });
    }
};

template <typename G> __device__ __forceinline__ void leave_sums(float* area, const TileSums<G>& sums) {
    float* own = area + own_warp() / G::ROW_WARPS * G::PLACES + own_warp() % G::ROW_WARPS * 16 * G::WEIGHT_TILES + own_row();
#pragma unroll
    for (int t = 0; t < G::TOKEN_TILES; ++t)
#pragma unroll
        for (int m = 0; m < G::WEIGHT_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                own[(t * 8 + own_quad() * 2 + i % 2) * G::STRIDE + m * 16 + i / 2 * 8] = sums[m][t][i];
}

// Of the slices that the teams have left, their group's sums, where the first one's were.
template <typename G> __device__ __forceinline__ void add_slices(float* area, int batch) {
    for (int i = threadIdx.x; i < batch * G::STRIDE / 4; i += G::THREADS) {
        float4 group = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int p = 0; p < G::K_WARPS; ++p) {
            const float4 one = reinterpret_cast<const float4*>(area + p * G::PLACES)[i];
            group.x += one.x, group.y += one.y, group.z += one.z, group.w += one.w;
        }
        reinterpret_cast<float4*>(area)[i] = group;
    }
}

// Grid (blocks, 1), which walk over the tiles, or (tiles, 4) in clusters of (1, 4).
template <typename T, typename G, typename Output>
__device__ __forceinline__ void multiply_tiles(const TiledLinear& arguments, const Output& output) {
    extern __shared__ __align__(16) char shared[];
    const Linear& linear = arguments.linear;
    int* begins = reinterpret_cast<int*>(shared);
    float* area = reinterpret_cast<float*>(shared + G::AREA_BEGIN);
    const int tiles = (linear.rows + G::UNIT - 1) / G::UNIT, own_tiles = (tiles - static_cast<int>(blockIdx.x) + gridDim.x - 1) / gridDim.x;
    const int blocks = SLICES * linear.steps / BLOCK_STEPS / G::PARTS, steps = blocks * BLOCK_STEPS;  // of a part of K
    const int first = (blockIdx.y * G::K_WARPS + own_warp() / G::ROW_WARPS) * blocks;

    launch_next_kernel();
    TileWeights<G> weights(linear, tiles, first, blocks, shared_address(shared + G::RINGS_BEGIN));
#pragma unroll
    for (int i = 0; i < G::DEPTH; ++i) {
        weights.copy();
        commit_copies();
    }
    wait_for_previous_kernel();
    if (threadIdx.x < 8 * G::TOKEN_TILES) {
        const SelectedRows source{arguments.selected, arguments.tokens};
        begins[threadIdx.x] = source(min(static_cast<int>(threadIdx.x), linear.batch - 1)) * arguments.stride;
    }
    __syncthreads();
    TeamActivations<T, G> activations(
        arguments, begins, first * BLOCK_COLUMNS, steps, own_tiles, shared_address(shared + G::INPUT_BEGIN));
    if constexpr (G::STAYS) {
#pragma unroll 1
        for (int i = 0; i < steps / G::CHUNK; ++i) activations.copy();
        commit_copies();
    } else {
#pragma unroll
        for (int i = 0; i < G::STAGES - 1; ++i) {
            activations.copy();
            commit_copies();
        }
    }
    JoinedOutputs<T, G, Output> outputs(linear, output);
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
        TileSums<G> sum = {}, group = {};
        if (outputs.EARLY && tile != blockIdx.x) outputs.read(tile * G::UNIT);
        int steps_left = linear.steps, slices = 0;
#pragma unroll 1
        for (int block = 0; block < blocks; ++block) {
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
                if (d * G::SCALES % BLOCK_STEPS == 0)
#pragma unroll
                    for (int i = 0; i < G::TILES; ++i) groups[i].set(held.scales[i], d * G::SCALES / BLOCK_STEPS);
                unsigned low[G::WEIGHT_TILES][4], high[G::WEIGHT_TILES][4];
#pragma unroll
                for (int m = 0; m < G::WEIGHT_TILES; ++m) {
                    groups[2 * m].values(held.word(2 * m, d), mask, low[m]);
                    groups[2 * m + 1].values(held.word(2 * m + 1, d), mask, high[m]);
                }
                if (last_step) held.read(slot);
                constexpr int PARTS = G::TOKEN_TILES / G::TOGETHER;
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    const uint4(&now)[G::TOGETHER] = rows[(d * PARTS + part) % 2];
                    const bool last = part + 1 == PARTS;
                    read_rows<G>(rows[(d * PARTS + part + 1) % 2], last ? following : place, last ? 0 : (part + 1) * G::TOGETHER);
#pragma unroll
                    for (int half = 0; half < 2; ++half)
#pragma unroll
                        for (int m = 0; m < G::WEIGHT_TILES; ++m) {
                            const unsigned a0[2] = {low[m][2 * half], high[m][2 * half]};
                            const unsigned a2[2] = {low[m][2 * half + 1], high[m][2 * half + 1]};
#pragma unroll
                            for (int t = 0; t < G::TOGETHER; ++t)
                                multiply_add(sum[m][part * G::TOGETHER + t], a0, a2, half == 0 ? now[t].x : now[t].z,
                                             half == 0 ? now[t].y : now[t].w, T());
                        }
                }
                place = following;
                if (G::PARTS == SLICES || (d + 1) % G::EVERY != 0) continue;
                steps_left -= G::EVERY;
                if (steps_left > 0) continue;
                steps_left = linear.steps;
                for_each_sum<G>([&](int m, int t, int i) { group[m][t][i] += sum[m][t][i], sum[m][t][i] = 0.f; });
                if (G::ALL && ++slices % SLICES_OF_A_GROUP == 0) total.add(group, slices / SLICES_OF_A_GROUP - 1);
            }
        }
        if constexpr (G::ALL) {
            total.take(group);
            write_own<T, G>(group, linear, output, tile * G::UNIT + own_warp() % G::ROW_WARPS * G::WARP_UNIT);
            continue;
        }
        if constexpr (G::CLUSTER > 1) wait_for_copies<0>();
        __syncthreads();  // the area has been read, or what lay there
        leave_sums<G>(area, G::PARTS == SLICES ? sum : group);
        if (!outputs.EARLY) outputs.read(tile * G::UNIT);
        __syncthreads();
        if constexpr (G::CLUSTER > 1) {
            if constexpr (G::PARTS == SLICES) add_slices<G>(area, linear.batch);
            cluster_barrier();
        }
        outputs.write(area, tile * G::UNIT);
        if constexpr (G::CLUSTER > 1) cluster_barrier();  // others have read what this block left
    }
}

#define TILES_KERNEL(NAME)                                                                                             \
    template <typename T, int TOKEN_TILES, int WEIGHT_TILES, int ROW_WARPS, int K_WARPS, int CLUSTER, int DEPTH,        \
              int STAGES, int CHUNK, int EVERY, int SCALES, int MODE, int BLOCKS>                                      \
    __global__ void __launch_bounds__(32 * ROW_WARPS * K_WARPS, BLOCKS) NAME(const __grid_constant__ TiledLinear arguments)
#define TILES_GEOMETRY(PAIRED)                                                                                         \
    TileGeometry<TOKEN_TILES, WEIGHT_TILES, ROW_WARPS, K_WARPS, CLUSTER, DEPTH, STAGES, CHUNK, EVERY, SCALES, MODE, PAIRED>

// output = scale (input weight^T + bias)
TILES_KERNEL(tiles_linear) {
    const FloatOutput output{static_cast<float*>(arguments.output), arguments.linear.scale};
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
