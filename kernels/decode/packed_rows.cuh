// Linear layers over packed weights of up to eight rows of activations, as decode steps have them, with the norm before them
// inside: the packed counterparts of linear.cu, with the same bits (packed_linear.cu says of which sums).
//
// What limits them is as much the time until products begin and after they end as it is memory. So a block has few
// registers, that the next kernel's finds room beside it; each warp copies weights ahead, before its kernel waits for the one
// before, up to all that it multiplies; activations are staged once; and the sums of several tiles are added at once.
#pragma once
#include "decode/few_rows.cuh"
#include "decode/packed_blocks.cuh"

namespace decode {
namespace packed {

// Of the sixteen warps, teams of SHARING share K of a tile of WEIGHT_TILES times 16 weight rows: each has a slice, or two, or a
// group of slices. ONE: there is one row of activations. WHOLE: all tiles and slices are. BRIEF: a warp's share of K is one
// block, whose activations stay in registers. Sums of PASS tiles are added at once. DEPTH blocks of weights that are copied ahead
// find room in shared memory; of 0, registers take them straight from memory. LATE: the next kernel starts when the last of
// them are under way, lest its own come first.
template <bool ONE_, bool WHOLE_, bool BRIEF_, int SHARING_, int WEIGHT_TILES_, int DEPTH_, bool LATE_, int PASS_, int EVERY_,
          int SCALES_, int MODE_, bool PAIRED>
struct RowsGeometry : Format<SCALES_, MODE_> {
    using Own = Format<SCALES_, MODE_>;
    static constexpr bool ONE = ONE_, WHOLE = WHOLE_, BRIEF = BRIEF_, LATE = LATE_;
    static constexpr int SHARING = SHARING_, TEAMS = SLICES / SHARING, ROWS = ONE ? 1 : 8, WEIGHT_TILES = WEIGHT_TILES_;
    static constexpr int DEPTH = DEPTH_, HALVES = 1, STAGES = DEPTH > 0 ? DEPTH : 1;  // as stage_normalized asks
    static constexpr int PASS = PASS_, EVERY = EVERY_, SCALES = SCALES_, MODE = MODE_, SUMS = PAIRED ? 2 : 1;
    static constexpr int TILES = 2 * WEIGHT_TILES, UNIT = 8 * TILES / SUMS, PAIRS = UNIT / 2;  // of 8 rows; output columns
    static constexpr int PIECES = Own::TAIL_BYTES / 16, SLOT_BYTES = TILES * Own::BLOCK_BYTES;  // of what follows codes
    // Shared memory: rings of weights, sums of slices [2, SLICES, PASS, ROWS, STRIDE], then sums of norms, the norms' weights
    // and activations [steps, rows, 64 bytes].
    static constexpr int STRIDE = 8 * TILES + 4, TILE = ROWS * STRIDE, OF_SLICE = PASS * TILE, AREA = SLICES * OF_SLICE;
    static constexpr int AREAS_BEGIN = SLICES * DEPTH * SLOT_BYTES, BEHIND = AREAS_BEGIN + 2 * AREA * 4;
    static constexpr int NORM_SUMS = 8 * SUM_STRIDE * 4;
    static_assert(SHARING == SLICES ? EVERY_ == BLOCK_STEPS : SHARING * 2 == SLICES ? EVERY_ % 2 == 0 : SHARING == GROUPS,
                  "a warp's share is whole blocks of weights");
    static_assert(PASS % TEAMS == 0 && PASS * ROWS * PAIRS <= decode::THREADS, "a thread writes two outputs of a pass at most");
    static __device__ constexpr int norm_bytes(int batch, int steps) { return BEHIND + NORM_SUMS + SLICES * steps * 64 * (1 + batch); }
};
static_assert(RowsGeometry<true, true, false, 8, 2, 3, true, 4, 2, 2, ZEROS, false>::norm_bytes(1, 3) == HOST_ONE_ROW_BYTES &&
                  RowsGeometry<false, false, false, 4, 1, 2, true, 4, 1, 1, ANY, true>::norm_bytes(5, 3) == HOST_ROWS_BYTES,
              "the host gives blocks their shared memory");

template <typename G> __device__ __forceinline__ int team_of_warp() { return G::TEAMS == 1 ? 0 : threadIdx.x / 32 / G::SHARING; }

// The weights of a warp: of its team's tiles the blocks of its share of K, one after the other.
template <typename G> struct Blocks {
    const char* next;  // the lane's codes of the tile's first eight rows
    int row_bytes, up_bytes, own, existing, block, tile, tiles, row_tiles, tile_step;
    size_t to_next_tile;

    __device__ explicit Blocks(const Linear& linear) : block(0), tiles((linear.rows + G::UNIT - 1) / G::UNIT) {
        const int warp = threadIdx.x / 32, team = team_of_warp<G>();
        const int blocks = (linear.columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
        own = G::BRIEF ? 1 : linear.steps * G::TEAMS / BLOCK_STEPS;
        const int first = warp % G::SHARING * own;
        existing = min(own, blocks - first), row_tiles = (linear.rows + 7) / 8;
        tile = blockIdx.x + gridDim.x * team, tile_step = gridDim.x * G::TEAMS;
        row_bytes = blocks * G::BLOCK_BYTES, up_bytes = row_tiles * row_bytes;
        const size_t begin = static_cast<size_t>(tile) * (G::UNIT / 8) * row_bytes + first * G::BLOCK_BYTES;
        next = static_cast<const char*>(linear.weight) + begin + threadIdx.x % 32 * 16;
        to_next_tile = static_cast<size_t>(tile_step) * (G::UNIT / 8) * row_bytes - own * G::BLOCK_BYTES;
    }
    // From the tile's first eight rows to the i-th, and whether these and the block exist.
    __device__ int offset(int i) const { return G::SUMS == 1 ? i * row_bytes : i / 2 * row_bytes + i % 2 * up_bytes; }
    __device__ bool exists(int i) const {
        return G::WHOLE || block < existing && (i < G::SUMS || i / G::SUMS < row_tiles - tile * (G::UNIT / 8));
    }
    __device__ __forceinline__ void advance() {
        next += G::BLOCK_BYTES;
        if (++block == own) block = 0, next += to_next_tile, tile += tile_step;
    }
};

// What a lane has of a block of 16 weight rows.
template <typename G> struct Sixteen {
    Lane<G::SCALES, G::MODE> eight[2];
};

// They come through a ring in shared memory; those behind the last column and the last row are zeros there.
template <typename G> struct Stream : Blocks<G> {
    unsigned ring, slot, place;

    __device__ Stream(const Linear& linear, const char* shared) : Blocks<G>(linear) {
        ring = slot = place = in_register(shared_address(shared) + threadIdx.x / 32 * G::DEPTH * G::SLOT_BYTES);
    }
    __device__ __forceinline__ void start() {
#pragma unroll
        for (int i = 0; i < G::DEPTH; ++i) copy(false);
    }
    __device__ unsigned following(unsigned place) const {
        return place == ring + (G::DEPTH - 1) * G::SLOT_BYTES ? ring : place + G::SLOT_BYTES;
    }
    // Copies the next block, as a group of its own.
    __device__ __forceinline__ void copy(bool has_begun = true) {
        if (this->tile < this->tiles) {
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int i = 0; i < G::TILES; ++i)
#pragma unroll
                for (int piece = 0; piece < G::TAIL_BEGIN; piece += 512)
                    copy_async_16(slot + i * G::BLOCK_BYTES + piece + lane * 16, this->next + (this->offset(i) + piece), this->exists(i));
#pragma unroll
            for (int first = 0; first < G::TILES * G::PIECES; first += 32) {
                const int piece = first + lane, i = piece / G::PIECES;
                const int begin = G::TAIL_BEGIN + piece % G::PIECES * 16;
                if (i < G::TILES)
                    copy_async_16(slot + i * G::BLOCK_BYTES + begin, this->next + (this->offset(i) + begin - lane * 16), this->exists(i));
            }
            this->advance();
        } else if (G::LATE && has_begun) {
            launch_next_kernel();
        }
        commit_copies();
        slot = following(slot);
    }
    __device__ __forceinline__ void begin() const {
        wait_for_copies<G::DEPTH - 1>();
        __syncwarp();  // other lanes' scales have come
    }
    // Of the block that is multiplied now, the m-th 16 rows.
    __device__ __forceinline__ Sixteen<G> read(int m) {
        Sixteen<G> held;
#pragma unroll
        for (int i = 0; i < 2; ++i) held.eight[i].read(SharedBlock{place + (2 * m + i) * G::BLOCK_BYTES});
        if (m + 1 < G::WEIGHT_TILES) return held;
        __syncwarp();  // all have been read
        copy();
        place = following(place);
        return held;
    }
    __device__ void load(int) const {}
};

// They come straight into registers, as soon as those of the block before have been multiplied.
template <typename G> struct Direct : Blocks<G> {
    Sixteen<G> held[G::WEIGHT_TILES];

    __device__ Direct(const Linear& linear, const char*) : Blocks<G>(linear) {}
    __device__ __forceinline__ void start() {
#pragma unroll
        for (int m = 0; m < G::WEIGHT_TILES; ++m) load(m);
    }
    __device__ __forceinline__ void begin() { this->advance(); }
    __device__ __forceinline__ const Sixteen<G>& read(int m) const { return held[m]; }
    // The m-th 16 rows of the next block, if there is one.
    __device__ __forceinline__ void load(int m) {
        if (this->tile >= this->tiles) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Lane<G::SCALES, G::MODE>& own = held[m].eight[i];
            if (this->exists(2 * m + i)) own.read(GlobalBlock{this->next - threadIdx.x % 32 * 16 + this->offset(2 * m + i)});
            else own = Lane<G::SCALES, G::MODE>{};
        }
    }
};
template <typename G, bool DIRECT> struct WeightsOf { using type = Stream<G>; };
template <typename G> struct WeightsOf<G, true> { using type = Direct<G>; };
template <typename G> using Source = typename WeightsOf<G, G::DEPTH == 0>::type;

// The two outputs of a pass that a thread writes, and what they need beside sums.
template <typename T, typename G, typename Output> struct OwnPair {
    const Linear& linear;
    const Output& output;
    int number, row, column;  // tile of the pass, row of activations, column of the tile
    float2 before, biases[G::SUMS];

    __device__ OwnPair(const Linear& linear, const Output& output) : linear(linear), output(output) {
        number = threadIdx.x / (G::PAIRS * G::ROWS), row = G::ONE ? 0 : threadIdx.x / G::PAIRS % G::ROWS;
        column = threadIdx.x % G::PAIRS * 2;
    }
    __device__ int place(int first) const { return (blockIdx.x + gridDim.x * (first + number)) * G::UNIT + column; }
    __device__ bool exists(int n) const { return number < G::PASS && row < linear.batch && n < linear.rows; }
    __device__ __forceinline__ void read(int first) {
        const int n = place(first);
        if (!exists(n)) return;
        const T* bias = static_cast<const T*>(linear.bias);
        before = output.before_two(row, n, linear.rows);
#pragma unroll
        for (int s = 0; s < G::SUMS; ++s)
            if (bias != nullptr) biases[s] = read_two(bias + s * linear.rows + n, n, linear.rows);
    }
    // Adds the sums of slices to those of groups, and groups in order.
    __device__ __forceinline__ void write(const float* area, int first) const {
        const int n = place(first);
        if (!exists(n)) return;
        const float* own = area + number * G::TILE + row * G::STRIDE + (G::SUMS == 1 ? column : column / 8 * 16 + column % 8);
        float2 sums[G::SUMS];
#pragma unroll
        for (int s = 0; s < G::SUMS; ++s) {
            sums[s] = make_float2(0.f, 0.f);
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                float2 group = make_float2(0.f, 0.f);
#pragma unroll
                for (int i = 0; i < SLICES_OF_A_GROUP; ++i) {
                    const float2 one = *reinterpret_cast<const float2*>(own + s * 8 + (g * SLICES_OF_A_GROUP + i) * G::OF_SLICE);
                    group.x += one.x, group.y += one.y;
                }
                sums[s].x += group.x, sums[s].y += group.y;
            }
            if (linear.bias != nullptr) sums[s].x += biases[s].x, sums[s].y += biases[s].y;
        }
        output.two(row, n, linear.rows, sums, before);
    }
};

// Leaves a slice's sums of a tile at the lane's place in [ROWS, STRIDE].
template <typename G> __device__ __forceinline__ void leave_slice(float* area, float (&sum)[4], int batch) {
#pragma unroll
    for (int second = 0; second < (G::ONE ? 1 : 2); ++second)
        if (own_quad() * 2 + second < batch)
            area[second * G::STRIDE] = sum[second], area[second * G::STRIDE + 8] = sum[2 + second];
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 0.f;
}

// All tiles of the block, of activations that are staged.
template <typename T, typename G, typename Output>
__device__ __forceinline__ void multiply_staged(
    const Linear& linear, Source<G>& stream, OwnPair<T, G, Output>& pair, const char* activations, float* area) {
    const int batch = G::ONE ? 1 : linear.batch, share = threadIdx.x / 32 % G::SHARING, team = team_of_warp<G>();
    const int step_bytes = batch * 64, row = G::ONE ? 0 : min(own_row(), batch - 1);
    const int first_byte = share * stream.own * BLOCK_STEPS * step_bytes + row * 64 + own_quad() * 16;
    const unsigned begin = in_register(shared_address(activations) + first_byte);
    const unsigned mask = linear.batch > 0 ? LOW : 0;  // for the compiler no constant, of which it would make many copies
    float* own_area = area + share * G::TEAMS * G::OF_SLICE + team * G::TILE + own_quad() * 2 * G::STRIDE + own_row();
    int tile = blockIdx.x + gridDim.x * team, buffer = 0;
    uint4 x[BLOCK_STEPS];
    const auto read_activations = [&](unsigned place) {
#pragma unroll
        for (int d = 0; d < BLOCK_STEPS; ++d) x[d] = read_shared_16(place + d * step_bytes);
    };
    if (G::BRIEF) read_activations(begin);
    for (int first = 0;; first += G::PASS, buffer ^= 1) {
        if (first > 0) pair.read(first);
        float* left = own_area + buffer * G::AREA;
#pragma unroll 1
        for (int i = 0; i < G::PASS / G::TEAMS && tile < stream.tiles; ++i, tile += stream.tile_step, left += G::TEAMS * G::TILE) {
            float sums[G::WEIGHT_TILES][4] = {};
            float* left_of_slice = left;
            unsigned place = begin;
            int steps_left = linear.steps;
#pragma unroll 1
            for (int block = 0; block < (G::BRIEF ? 1 : stream.own); ++block) {
                stream.begin();
                if (!G::BRIEF) read_activations(place), place += BLOCK_STEPS * step_bytes;
                const int before = steps_left;
#pragma unroll
                for (int m = 0; m < G::WEIGHT_TILES; ++m) {
                    const auto& held = stream.read(m);
                    steps_left = before;
                    Group<T, G::MODE> groups[2];
                    float* left_of_tile = left_of_slice + m * 16;
#pragma unroll
                    for (int d = 0; d < BLOCK_STEPS; ++d) {
                        unsigned low[4], high[4];
                        held.eight[0].begin(groups[0], d, mask), held.eight[1].begin(groups[1], d, mask);
                        held.eight[0].values(groups[0], d, mask, low);
                        held.eight[1].values(groups[1], d, mask, high);
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const unsigned a0[2] = {low[2 * half], high[2 * half]}, a2[2] = {low[2 * half + 1], high[2 * half + 1]};
                            multiply_add(sums[m], a0, a2, half == 0 ? x[d].x : x[d].z, half == 0 ? x[d].y : x[d].w, T());
                        }
                        if (G::TEAMS == 1 || (d + 1) % G::EVERY != 0) continue;
                        steps_left -= G::EVERY;
                        if (steps_left > 0) continue;
                        leave_slice<G>(left_of_tile, sums[m], batch);
                        steps_left = linear.steps, left_of_tile += G::OF_SLICE;
                    }
                    stream.load(m);
                    if (G::TEAMS > 1 && m + 1 == G::WEIGHT_TILES) left_of_slice = left_of_tile - m * 16;
                }
            }
            if (G::TEAMS == 1)
#pragma unroll
                for (int m = 0; m < G::WEIGHT_TILES; ++m) leave_slice<G>(left + m * 16, sums[m], batch);
        }
        __syncthreads();
        pair.write(area + buffer * G::AREA, first);
        if (static_cast<int>(blockIdx.x + gridDim.x * (first + G::PASS)) >= stream.tiles) break;
    }
}

// Activations as they are. A warp's share may be more than the slice that it stages.
template <typename T, typename G, typename Rows>
__device__ __forceinline__ void stage_input(const T* input, const Rows& source, char* activations, const Linear& linear) {
    stage_as_is(input, source, activations, G::ONE ? 1 : linear.batch, linear.columns, linear.steps);
    if (G::TEAMS > 1) __syncthreads();
}

// NORMED: the input's norm is inside; ROUNDED: it has none, and is rounded to T; else the input is of T, as it is.
template <typename T, typename G, bool NORMED, bool ROUNDED, typename Arguments, typename Output>
__device__ __forceinline__ void multiply_input(const Arguments& arguments, const Output& output) {
    extern __shared__ __align__(16) char shared[];
    const Linear& linear = arguments.linear;
    const auto inputs = one_input<T>(arguments, G::AREAS_BEGIN);
    const int batch = G::ONE ? 1 : linear.batch, columns = linear.columns, steps = linear.steps;
    float* area = reinterpret_cast<float*>(shared + G::AREAS_BEGIN);
    T* norm_weights = reinterpret_cast<T*>(shared + G::BEHIND + (NORMED ? G::NORM_SUMS : 0));
    char* activations = reinterpret_cast<char*>(norm_weights + (NORMED ? SLICES * steps * 32 : 0));
    if (arguments.next_early && !G::LATE) launch_next_kernel();
    if (NORMED) {
        inputs.copy_weights(norm_weights, columns);
        if (G::DEPTH == 0) commit_copies();
    }
    Source<G> stream(linear, shared);
    stream.start();
    inputs.prefetch();
    OwnPair<T, G, Output> pair(linear, output);
    if (!arguments.beside) wait_for_previous_kernel();
    if (!arguments.next_early && !G::LATE) launch_next_kernel();
    pair.read(0);
    if constexpr (NORMED)
        stage_normalized<T, 1, 1, G>(
            inputs, norm_weights, reinterpret_cast<float*>(shared + G::BEHIND), activations, batch, columns, steps);
    else if constexpr (ROUNDED) {
        stage_rounded<T>(inputs, activations, batch, columns, steps);
        if (G::TEAMS > 1) __syncthreads();
    } else
        stage_input<T, G>(static_cast<const T*>(inputs.values[0]), SelectedRows{nullptr, 1}, activations, linear);
    multiply_staged(linear, stream, pair, activations, area);
    if (arguments.beside) wait_for_previous_kernel();
}

#define ROWS_KERNEL(NAME, ARGUMENTS)                                                                                   \
    template <typename T, bool ONE, bool WHOLE, bool BRIEF, int SHARING, int WEIGHT_TILES, int DEPTH, bool LATE,      \
              int PASS, int EVERY, int SCALES, int MODE, int BLOCKS>                                                   \
    __global__ void __launch_bounds__(decode::THREADS, BLOCKS) NAME(const __grid_constant__ ARGUMENTS arguments)

#define ROWS_GEOMETRY(PAIRED)                                                                                          \
    RowsGeometry<ONE, WHOLE, BRIEF, SHARING, WEIGHT_TILES, DEPTH, LATE, PASS, EVERY, SCALES, MODE, PAIRED>

}  // namespace packed
}  // namespace decode
