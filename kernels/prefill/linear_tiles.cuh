// Tiles of linear.cu: where a thread's sums stand, how weights and activations come into shared memory, and from there
// to the tensor cores.
//
// A stage of the ring holds 64 columns for each team of warps, in two steps of 32; of each step first the weight rows,
// then the rows of activations, 64 bytes each without gaps. So the 16 bytes that a lane reads of eight rows lie beside
// the next lane's.
#pragma once
#include "decode/outputs.cuh"
#include "shared/tile_sums.cuh"

namespace prefill {
using namespace decode;

constexpr int STAGE_COLUMNS = 64, STAGE_STEPS = 2, ROW_BYTES = 64, STAGES = HOST_STAGES;
constexpr int GROUPS = SLICES / SLICES_OF_A_GROUP;
constexpr int BAND = 1024;  // rows of activations whose tiles are neighbours in time

// Where the sums of groups of slices are added: in registers, in shared memory, or each group by a team of warps of its
// own, which join theirs in shared memory.
enum Totals { REGISTERS, SHARED, JOINED };

// Tiles of a warp: ROW_TILES of 16 rows of activations, COLUMN_TILES of 8 weight rows; ROW_WARPS times COLUMN_WARPS
// warps a team. PAIRED: the second half of a tile's weight rows holds up rows, `rows` below the gate rows in the first
// half; every second column tile of a warp is of them. ADAPTED: with LoRA adapters.
template <int ROW_TILES_, int COLUMN_TILES_, int ROW_WARPS_, int COLUMN_WARPS_, int TOTALS_, bool PAIRED_,
          bool ADAPTED_>
struct Geometry {
    static constexpr int ROW_TILES = ROW_TILES_, COLUMN_TILES = COLUMN_TILES_, ROW_WARPS = ROW_WARPS_;
    static constexpr int COLUMN_WARPS = COLUMN_WARPS_, TOTALS = TOTALS_;
    static constexpr bool PAIRED = PAIRED_, ADAPTED = ADAPTED_;
    static constexpr int TEAMS = TOTALS == JOINED ? GROUPS : 1;
    static constexpr int TEAM = 32 * ROW_WARPS * COLUMN_WARPS, THREADS = TEAMS * TEAM;
    static constexpr int ROWS = 16 * ROW_TILES * ROW_WARPS, WEIGHT_ROWS = 8 * COLUMN_TILES * COLUMN_WARPS;
    static constexpr int SUMS = PAIRED ? 2 : 1;      // that an output is made of
    static constexpr int UNIT = WEIGHT_ROWS / SUMS;  // output columns of a tile
    static constexpr int STEP_BYTES = (WEIGHT_ROWS + ROWS) * ROW_BYTES, TEAM_BYTES = STAGE_STEPS * STEP_BYTES;
    static constexpr int STAGE_BYTES = TEAMS * TEAM_BYTES;
    static constexpr int AT_ONCE = THREADS / 8;  // rows that all threads copy at once
    static_assert(COLUMN_TILES % SUMS == 0 && UNIT % AT_ONCE == 0 && ROWS % AT_ONCE == 0, "whole pairs and rounds");
};

// Where a thread's sums stand in the tile.
template <typename G> struct Lane {
    int row, column_warp;

    __device__ Lane() : Lane(threadIdx.x / 32 % G::ROW_WARPS, threadIdx.x % G::TEAM / 32 / G::ROW_WARPS) {}
    __device__ Lane(int row_warp, int column) : row(row_warp * G::ROW_TILES * 16), column_warp(column) {}
    // The first weight row of the warp's tile `c`.
    __device__ int tile_row(int c) const {
        const int tile = column_warp * G::COLUMN_TILES + c;
        return G::PAIRED ? tile % 2 * G::UNIT + tile / 2 * 8 : tile * 8;
    }
    __device__ int row_of(int r, int half) const { return row + r * 16 + half * 8 + threadIdx.x % 32 / 4; }
    // The first of two.
    __device__ int weight_row_of(int c) const { return tile_row(c) + threadIdx.x % 4 * 2; }
};

// sum [16, 8] += a [16, 16] times the transpose of b [8, 16]. Nothing but its operands decides where it stands.
#define PROMPT_MULTIPLY(T, NAME)                                                                                       \
    __device__ __forceinline__ void multiply_rows(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, \
                                                  unsigned b0, unsigned b1, T) {                                       \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 "                                             \
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                                    \
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                   \
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                                   \
    }
PROMPT_MULTIPLY(__half, "f16")
PROMPT_MULTIPLY(__nv_bfloat16, "bf16")
#undef PROMPT_MULTIPLY

// What a warp multiplies in a step of 32 columns: of each row a lane has eight columns, of which the first four are
// multiplied first, as the decode kernels do. Weights come in two parts, if a part has work for long enough: the second
// while the first is multiplied, and while the second is, the first of the next step.
template <typename G> struct Fragments {
    static constexpr bool IN_PARTS = G::ROW_TILES * G::COLUMN_TILES >= 16 || G::TOTALS == JOINED;
    static constexpr int PARTS = IN_PARTS ? 2 : 1, TILES = G::COLUMN_TILES / PARTS;
    unsigned activations[G::ROW_TILES][2][4];
    uint4 weights[G::COLUMN_TILES], next[G::ROW_TILES][2];

    static __device__ uint4 at(const char* place) { return *reinterpret_cast<const uint4*>(place); }
    __device__ void read_weights(const char* step, const Lane<G>& lane, int c) {
        weights[c] = at(step + lane.tile_row(c) * ROW_BYTES + threadIdx.x % 32 * 16);
    }
    __device__ void read_activations(const char* step, const Lane<G>& lane, int r) {
        const char* rows = step + (G::WEIGHT_ROWS + lane.row) * ROW_BYTES + threadIdx.x % 32 * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) next[r][half] = at(rows + (r * 16 + half * 8) * ROW_BYTES);
    }
    // What a step begins with.
    __device__ void read(const char* step, const Lane<G>& lane) {
#pragma unroll
        for (int r = 0; r < G::ROW_TILES; ++r) read_activations(step, lane, r);
#pragma unroll
        for (int c = 0; c < TILES; ++c) read_weights(step, lane, c);
    }
    // The next step's activations as the tensor cores take them: four registers side by side, of two loads. What is
    // combined with a zero that the compiler does not know is a value of its own to it; else it would put the four
    // together anew for each product, with more moves than products.
    __device__ void begin(unsigned zero) {
#pragma unroll
        for (int r = 0; r < G::ROW_TILES; ++r) {
            const uint4 &low = next[r][0], &high = next[r][1];
            const unsigned given[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < 4; ++i) activations[r][half][i] = given[half][i] | zero;
        }
    }
    template <typename T> __device__ void multiply(float (&sum)[4], int r, int c, int half, T) const {
        const unsigned(&a)[4] = activations[r][half];
        const uint4& b = weights[c];
        multiply_rows(sum, a[0], a[1], a[2], a[3], half == 0 ? b.x : b.z, half == 0 ? b.y : b.w, T());
    }
};

// A matrix product's operands. rows: N, or half of it of gate and up. input: rows `stride` elements apart, of which
// `source` says where row b lies. team_columns: of a group of slices. waits: the previous kernel may write weights.
template <typename T> struct Operands {
    const T *weight, *input;
    int stride, batch, rows, columns, team_columns;
    bool waits;
    SelectedRows source;
};

// The first row of activations, and the first output column, of a tile.
struct Place {
    int row, column;
};

// All tiles, in chunks of 64 columns, those of a team. Blocks that run at once have tiles of few rows of activations
// and few weight rows, which the second-level cache then gives to several: tiles go downwards within a band.
struct Work {
    int tile_rows, tile_columns, high, wide, tiles, chunks;

    __device__ Work(int height, int width, int batch, int rows, int all_chunks)
        : tile_rows(height), tile_columns(width), high((batch + height - 1) / height), wide((rows + width - 1) / width),
          tiles(high * wide), chunks(all_chunks) {}
    __device__ Place place_of(int tile) const {
        const int band = BAND / tile_rows, begin = tile / (band * wide) * band, within = tile - begin * wide;
        const int height = min(band, high - begin);
        return {(begin + within % height) * tile_rows, within / height * tile_columns};
    }
};

// Every thread copies 16 bytes of some rows, those of a chunk in one group. A barrier of the block for each chunk says
// that it has come, and that the one before has been read: its stage is filled again.
template <typename T, typename G> struct Copies {
    const Operands<T>& operands;
    const Work& work;
    const char* memory;
    int read_stage, written_stage, tile, chunk;
    int own_row, own_column;
    unsigned own;
    const T *weights[G::SUMS], *input;  // of the thread's first rows, where the next chunk begins
    int weight_rows, input_rows;        // that exist from there on

    __device__ Copies(const Operands<T>& given, const Work& all, const char* shared)
        : operands(given), work(all), memory(shared), read_stage(-1), written_stage(0), tile(blockIdx.x), chunk(0) {
        const int lane = threadIdx.x % 32, step = lane / 8 % 2, piece = lane % 4;
        own_row = threadIdx.x / 32 * 4 + lane / 16 * 2 + lane / 4 % 2, own_column = step * 32 + piece * 8;
        own = shared_address(shared) + step * G::STEP_BYTES + own_row * ROW_BYTES + piece * 16;
        begin_tile();
        if (operands.waits) wait_for_previous_kernel();
        Copies early = *this;  // weights come before what the previous kernel computes is there
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; ++i) early.template copy<true, false>();
        wait_for_previous_kernel();
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; ++i) copy<false, true>();
    }
    // Behind the last row and the last column are zeros, for which nothing is read.
    template <bool WEIGHTS = true, bool INPUT = true> __device__ void copy() {
        if (tile < work.tiles) {
            const int columns = operands.columns - chunk * STAGE_COLUMNS - own_column;
#pragma unroll
            for (int team = 0; team < G::TEAMS; ++team) {
                const int first = team * operands.team_columns;
                const unsigned target = own + written_stage * G::STAGE_BYTES + team * G::TEAM_BYTES;
#pragma unroll
                for (int s = 0; WEIGHTS && s < G::SUMS; ++s)
                    copy_rows<G::UNIT>(target + s * G::UNIT * ROW_BYTES, weights[s] + first, operands.columns,
                                       first < columns ? weight_rows : 0);
                if (!INPUT) continue;
                const unsigned rows = target + G::WEIGHT_ROWS * ROW_BYTES;
                if (operands.source.selected == nullptr)
                    copy_rows<G::ROWS>(rows, input + first, operands.stride, first < columns ? input_rows : 0);
                else copy_selected(rows, first, first < columns ? input_rows : 0);
            }
#pragma unroll
            for (int s = 0; s < G::SUMS; ++s) weights[s] += STAGE_COLUMNS;
            input += STAGE_COLUMNS;
            if (++chunk == work.chunks) {
                chunk = 0, tile += gridDim.x;
                begin_tile();
            }
        }
        if (++written_stage == STAGES) written_stage = 0;
        if (INPUT) commit_copies();
    }
    __device__ void begin_tile() {
        if (tile >= work.tiles) return;
        const Place place = work.place_of(tile);
#pragma unroll
        for (int s = 0; s < G::SUMS; ++s) {
            const size_t line = place.column + own_row + s * operands.rows;
            weights[s] = operands.weight + line * operands.columns + own_column;
        }
        input = operands.input + static_cast<size_t>(place.row + own_row) * operands.stride + own_column;
        weight_rows = operands.rows - place.column - own_row, input_rows = operands.batch - place.row - own_row;
    }
    __device__ const char* stage() const {
        return memory + read_stage * G::STAGE_BYTES + threadIdx.x / G::TEAM * G::TEAM_BYTES;
    }
    // The stage of the next chunk, once it has come. All threads of the block call it, then `copy`.
    __device__ const char* next_stage() {
        if (++read_stage == STAGES) read_stage = 0;
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        return stage();
    }

  private:
    template <int ROWS> static __device__ void copy_rows(unsigned target, const T* source, int columns, int exist) {
#pragma unroll
        for (int row = 0; row < ROWS; row += G::AT_ONCE) {
            copy_async_16(target + row * ROW_BYTES, source, row < exist);
            source += static_cast<size_t>(columns) * G::AT_ONCE;
        }
    }
    __device__ void copy_selected(unsigned target, int first, int exist) const {
#pragma unroll
        for (int row = 0; row < G::ROWS; row += G::AT_ONCE) {
            const int line = operands.source(row < exist ? operands.batch - input_rows + row : 0);
            const T* source = operands.input + static_cast<size_t>(line) * operands.stride + own_column + first;
            copy_async_16(target + row * ROW_BYTES, source + chunk * STAGE_COLUMNS, row < exist);
        }
    }
};

}  // namespace prefill
