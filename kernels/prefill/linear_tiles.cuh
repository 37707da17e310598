// Tiles of linear.cu: where a thread's sums stand, how weights and activations come into shared memory, and from there
// to the tensor cores.
//
// A stage of the ring holds 64 columns for each team of warps, in two steps of 32; of each step first the weight rows,
// then the rows of activations, 64 bytes each without gaps. So the 16 bytes that a lane reads of eight rows lie beside
// the next lane's. Of packed weights a stage holds 128 columns: their blocks, then the activations of four steps.
#pragma once
#include "decode/outputs.cuh"
#include "decode/packed_blocks.cuh"
#include "shared/tile_sums.cuh"

namespace prefill {
using namespace decode;

constexpr int ROW_BYTES = 64, STAGES = HOST_STAGES;
constexpr int BAND = 1024;  // rows of activations whose tiles are neighbours in time

// Where the sums of groups of slices are added: in registers, in shared memory, or each group by a team of warps of its
// own, which join theirs in shared memory.
enum Totals { REGISTERS, SHARED, JOINED };

// Tiles of a warp: ROW_TILES of 16 rows of activations, COLUMN_TILES of 8 weight rows; ROW_WARPS times COLUMN_WARPS
// warps a team. PAIRED: the second half of a tile's weight rows holds up rows, `rows` below the gate rows in the first
// half; every second column tile of a warp is of them. ADAPTED: with LoRA adapters. SCALES, MODE: of the format of
// packed weights; of dense ones there are no SCALES. SORTED: rows are `SortedRows`.
template <int ROW_TILES_, int COLUMN_TILES_, int ROW_WARPS_, int COLUMN_WARPS_, int TOTALS_, bool PAIRED_,
          bool ADAPTED_, int SCALES_ = 0, int MODE_ = 0, bool SORTED_ = false>
struct Geometry {
    static constexpr int ROW_TILES = ROW_TILES_, COLUMN_TILES = COLUMN_TILES_, ROW_WARPS = ROW_WARPS_;
    static constexpr int COLUMN_WARPS = COLUMN_WARPS_, TOTALS = TOTALS_;
    static constexpr int SCALES = SCALES_, MODE = MODE_;
    static constexpr bool PAIRED = PAIRED_, ADAPTED = ADAPTED_, IS_PACKED = SCALES > 0;
    static constexpr bool SORTED = SORTED_;
    static constexpr int TEAMS = TOTALS == JOINED ? GROUPS : 1;
    static constexpr int TEAM = 32 * ROW_WARPS * COLUMN_WARPS, THREADS = TEAMS * TEAM;
    static constexpr int ROWS = 16 * ROW_TILES * ROW_WARPS, WEIGHT_ROWS = 8 * COLUMN_TILES * COLUMN_WARPS;
    static constexpr int SUMS = PAIRED ? 2 : 1;      // that an output is made of
    static constexpr int UNIT = WEIGHT_ROWS / SUMS;  // output columns of a tile
    static constexpr int STAGE_STEPS = IS_PACKED ? packed::BLOCK_STEPS : 2, STAGE_COLUMNS = 32 * STAGE_STEPS;
    // Of a stage's rows of activations: where they begin behind a step, or behind all weights; of each step.
    static constexpr int BLOCK_BYTES = packed::Format<IS_PACKED ? SCALES : 1, MODE>::BLOCK_BYTES;
    static constexpr int INPUT_BEGIN = IS_PACKED ? WEIGHT_ROWS / 8 * BLOCK_BYTES : WEIGHT_ROWS * ROW_BYTES;
    static constexpr int STEP_BYTES = (IS_PACKED ? ROWS : WEIGHT_ROWS + ROWS) * ROW_BYTES;
    static constexpr int TEAM_BYTES = STAGE_STEPS * STEP_BYTES + (IS_PACKED ? INPUT_BEGIN : 0);
    static constexpr int STAGE_BYTES = TEAMS * TEAM_BYTES;
    static constexpr int AT_ONCE = THREADS / (4 * STAGE_STEPS);  // rows that all threads copy at once
    static_assert(COLUMN_TILES % SUMS == 0 && ROWS % AT_ONCE == 0, "whole pairs and rounds");
    static_assert(IS_PACKED ? COLUMN_TILES % 2 == 0 : UNIT % AT_ONCE == 0, "pairs of weight tiles, or whole rounds");
};

// Where a thread's sums stand in the tile.
template <typename G> struct Lane : WarpTiles<G> {
    __device__ Lane() : Lane(threadIdx.x / 32 % G::ROW_WARPS, threadIdx.x % G::TEAM / 32 / G::ROW_WARPS) {}
    __device__ Lane(int row_warp, int column) : WarpTiles<G>{row_warp * G::ROW_TILES * 16, column} {}
    __device__ int row_of(int r, int half) const { return this->row + r * 16 + half * 8 + threadIdx.x % 32 / 4; }
    // The first of two.
    __device__ int weight_row_of(int c) const { return this->tile_row(c) + threadIdx.x % 4 * 2; }
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

// What a step begins: a slice, whose predecessor is first added to its group; a group, whose predecessor is then added
// to the total.
enum Begins { NOTHING, SLICE, GROUP };

// What a warp multiplies in a step of 32 columns: of each row a lane has eight columns, of which the first four are
// multiplied first, as the decode kernels do. Weights come in two parts, if a part has work for long enough: the second
// while the first is multiplied, and while the second is, the first of the next step.
template <typename T, typename G> struct DenseFragments {
    static constexpr bool IN_PARTS = G::ROW_TILES * G::COLUMN_TILES >= 16 || G::TOTALS == JOINED;
    static constexpr int PARTS = IN_PARTS ? 2 : 1, TILES = G::COLUMN_TILES / PARTS;
    unsigned activations[G::ROW_TILES][2][4];
    uint4 weights[G::COLUMN_TILES], next[G::ROW_TILES][2];
    const unsigned zero;  // which the compiler does not know

    __device__ explicit DenseFragments(unsigned nothing) : zero(nothing) {}
    static __device__ uint4 at(const char* place) { return *reinterpret_cast<const uint4*>(place); }
    __device__ void read_weights(const char* step, const Lane<G>& lane, int c) {
        weights[c] = at(step + lane.tile_row(c) * ROW_BYTES + threadIdx.x % 32 * 16);
    }
    __device__ void read_activations(const char* step, const Lane<G>& lane, int r) {
        const char* rows = step + (G::WEIGHT_ROWS + lane.row) * ROW_BYTES + threadIdx.x % 32 * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) next[r][half] = at(rows + (r * 16 + half * 8) * ROW_BYTES);
    }
    // What the first step begins with.
    __device__ void read(const char* step, const Lane<G>& lane) {
#pragma unroll
        for (int r = 0; r < G::ROW_TILES; ++r) read_activations(step, lane, r);
#pragma unroll
        for (int c = 0; c < TILES; ++c) read_weights(step, lane, c);
    }
    // The next step's activations as the tensor cores take them: four registers side by side, of two loads. What is
    // combined with a zero that the compiler does not know is a value of its own to it; else it would put the four
    // together anew for each product, with more moves than products.
    __device__ void begin() {
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
    // Multiplies the step that lies at `step`, adding to `sums`, and reads what the next one begins with, which lies
    // where `next` says.
    template <int BEGINS, int, typename Its, typename Next>
    __device__ void multiply(Its& sums, const char* step, const Lane<G>& lane, const Next& next) {
        const auto nothing = [](int) {};
        if constexpr (PARTS == 2) {
            multiply_part<BEGINS>(sums, 0, 0, [&](int c) { read_weights(step, lane, TILES + c); });
            multiply_part<BEGINS>(sums, 0, 1, nothing);
            const char* after = next();
            multiply_part<BEGINS>(sums, 1, 0, [&](int c) {
#pragma unroll
                for (int r = c; r < G::ROW_TILES; r += TILES) read_activations(after, lane, r);
                read_weights(after, lane, c);
            });
            multiply_part<BEGINS>(sums, 1, 1, nothing);
        } else {
            multiply_part<BEGINS>(sums, 0, 0, nothing);
            const char* after = next();
#pragma unroll
            for (int r = 0; r < G::ROW_TILES; ++r) read_activations(after, lane, r);
            multiply_part<BEGINS>(sums, 0, 1, [&](int c) { read_weights(after, lane, c); });
        }
    }

  private:
    // Multiplies one half of a step's columns by a part of its weights; `then` follows each column tile of the part.
    template <int BEGINS, typename Its, typename Then>
    __device__ void multiply_part(Its& sums, int part, int half, const Then& then) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const int c = part * TILES + i;
#pragma unroll
            for (int r = 0; r < G::ROW_TILES; ++r) {
                if (half == 0) sums.template begin<BEGINS>(r, c);
                const unsigned(&a)[4] = activations[r][half];
                const uint4& b = weights[c];
                multiply_rows(sums.slice[r][c], a[0], a[1], a[2], a[3], half == 0 ? b.x : b.z, half == 0 ? b.y : b.w,
                              T());
            }
            then(i);
        }
    }
};

// The first row of activations, and the first output column, of a tile.
struct Place {
    int row, column;
};

// Rows of activations that go through a mixture's experts, each through several of them: sorted by the expert, so that
// a tile has rows of one. Of each row of the `tiles` there is which row of the input it is, and which of the output it
// becomes (-1: none); of each tile there is its expert. An expert's weights lie so many bytes behind those of the one
// before, and its biases so many elements.
struct SortedRows {
    const int *source, *target, *expert, *tiles;
    unsigned long long weight_bytes;
    int bias_elements;
    template <typename G> __device__ int expert_of(const Place& place) const {
        return __ldcg(expert + place.row / G::ROWS);
    }
};

// A matrix product's operands. weight: of T, or blocks of packed ones. rows: N, or half of it of gate and up. input:
// rows `stride` elements apart, of which `source` says where row b lies. team_columns: of a group of slices.
template <typename T> struct Operands {
    const T *weight, *input;
    int stride, batch, rows, columns, team_columns;
    SelectedRows source;
};

// Those of rows that are sorted: the weight is that of a tile's expert.
template <typename T, typename G> struct SortedOperands : Operands<T> {
    SortedRows sorted;
    const char* every_weight;

    // What the tiles are is what the kernels before say: gives their rows.
    __device__ int begin() {
        wait_for_previous_kernel();
        every_weight = reinterpret_cast<const char*>(this->weight);
        return this->batch = __ldcg(sorted.tiles) * G::ROWS;
    }
    __device__ void begin_tile(const Place& place) {
        const char* own = every_weight + sorted.expert_of<G>(place) * sorted.weight_bytes;
        this->weight = reinterpret_cast<const T*>(own);
    }
};
template <typename T, typename G>
using OperandsOf = typename Choose<G::SORTED, SortedOperands<T, G>, Operands<T>>::type;

// All tiles, in chunks of a stage's columns, those of a team. Blocks that run at once have tiles of few rows of
// activations and few weight rows, which the second-level cache then gives to several: tiles go downwards within a band.
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

// Copies 16 bytes of every AT_ONCE-th of ROWS rows, of which so many exist.
template <typename T, typename G, int ROWS>
__device__ __forceinline__ void copy_rows(unsigned target, const T* source, int columns, int exist) {
#pragma unroll
    for (int row = 0; row < ROWS; row += G::AT_ONCE) {
        copy_async_16(target + row * ROW_BYTES, source, row < exist);
        source += static_cast<size_t>(columns) * G::AT_ONCE;
    }
}

// What a thread copies of dense weights.
template <typename T, typename G> struct DenseCopies {
    const T* weights[G::SUMS];  // of the thread's first rows, where the next chunk begins
    int rows;                   // that exist from there on

    __device__ void begin_tile(const Operands<T>& operands, const Place& place, int row, int column) {
#pragma unroll
        for (int s = 0; s < G::SUMS; ++s) {
            const size_t line = place.column + row + s * operands.rows;
            weights[s] = operands.weight + line * operands.columns + column;
        }
        rows = operands.rows - place.column - row;
    }
    // Of a chunk, a team's; `own` is where the thread's part of the stage begins.
    __device__ void copy(const Operands<T>& operands, int team, int, unsigned, unsigned own, bool exists) const {
#pragma unroll
        for (int s = 0; s < G::SUMS; ++s)
            copy_rows<T, G, G::UNIT>(own + s * G::UNIT * ROW_BYTES, weights[s] + team * operands.team_columns,
                                     operands.columns, exists ? rows : 0);
    }
    __device__ void advance() {
#pragma unroll
        for (int s = 0; s < G::SUMS; ++s) weights[s] += G::STAGE_COLUMNS;
    }
};

// Which rows of the input those are that a thread copies, where rows are sorted.
template <typename G, bool = G::SORTED> struct Sources {};
template <typename G> struct Sources<G, true> { int sources[G::ROWS / G::AT_ONCE]; };

// Every thread copies 16 bytes of some rows, those of a chunk in one group. A barrier of the block for each chunk says
// that it has come, and that the one before has been read: its stage is filled again.
template <typename T, typename G, typename Weights> struct Copies : Sources<G> {
    OperandsOf<T, G>& operands;
    const Work& work;
    const char* memory;
    int read_stage, written_stage, tile, chunk;
    int own_row, own_column;
    unsigned own;
    Weights weights;
    const T* input;  // of the thread's first row, where the next chunk begins
    int input_rows;  // that exist from there on

    __device__ Copies(OperandsOf<T, G>& given, const Work& all, const char* shared)
        : operands(given), work(all), memory(shared), read_stage(-1), written_stage(0), tile(blockIdx.x), chunk(0) {
        constexpr int STEPS = G::STAGE_STEPS;
        const int lane = threadIdx.x % 32, step = lane / 8 % STEPS, piece = lane % 4;
        own_row = threadIdx.x / 32 * (8 / STEPS) + lane / (8 * STEPS) * 2 + lane / 4 % 2;
        own_column = step * 32 + piece * 8;
        own = shared_address(shared) + step * G::STEP_BYTES + own_row * ROW_BYTES + piece * 16;
        begin_tile();
        if constexpr (!G::SORTED) {  // weights come before what the previous kernel computes is there
            Copies early = *this;
#pragma unroll 1
            for (int i = 0; i < STAGES - 1; ++i) early.template copy<true, false>();
            wait_for_previous_kernel();
        }
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; ++i) copy<G::SORTED, true>();
    }
    // Behind the last row and the last column are zeros, for which nothing is read.
    template <bool WEIGHTS = true, bool INPUT = true> __device__ void copy() {
        if (tile < work.tiles) {
            const int columns = operands.columns - chunk * G::STAGE_COLUMNS - own_column;
#pragma unroll
            for (int team = 0; team < G::TEAMS; ++team) {
                const int first = team * operands.team_columns;
                const unsigned place = written_stage * G::STAGE_BYTES + team * G::TEAM_BYTES, target = own + place;
                const unsigned stage = shared_address(memory) + place;
                if (WEIGHTS) weights.copy(operands, team, chunk, stage, target, first < columns);
                if (!INPUT) continue;
                const unsigned rows = target + G::INPUT_BEGIN;
                if constexpr (G::SORTED) copy_sorted(rows, first, first < columns);
                else if (operands.source.selected == nullptr)
                    copy_rows<T, G, G::ROWS>(rows, input + first, operands.stride, first < columns ? input_rows : 0);
                else copy_selected(rows, first, first < columns ? input_rows : 0);
            }
            weights.advance();
            input += G::STAGE_COLUMNS;
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
        if constexpr (G::SORTED) operands.begin_tile(place);
        weights.begin_tile(operands, place, own_row, own_column);
        input = operands.input + static_cast<size_t>(place.row + own_row) * operands.stride + own_column;
        input_rows = operands.batch - place.row - own_row;
        if constexpr (G::SORTED) {
            input = operands.input + own_column;
#pragma unroll
            for (int row = 0; row < G::ROWS; row += G::AT_ONCE)
                this->sources[row / G::AT_ONCE] = __ldcg(operands.sorted.source + place.row + own_row + row);
        }
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
    __device__ void copy_sorted(unsigned target, int first, bool exists) const {
#pragma unroll
        for (int row = 0; row < G::ROWS; row += G::AT_ONCE) {
            const int line = this->sources[row / G::AT_ONCE];
            const T* source = input + static_cast<size_t>(max(line, 0)) * operands.stride + first;
            copy_async_16(target + row * ROW_BYTES, source, exists && line >= 0);
        }
    }
    __device__ void copy_selected(unsigned target, int first, int exist) const {
#pragma unroll
        for (int row = 0; row < G::ROWS; row += G::AT_ONCE) {
            const int line = operands.source(row < exist ? operands.batch - input_rows + row : 0);
            const T* source = operands.input + static_cast<size_t>(line) * operands.stride + own_column + first;
            copy_async_16(target + row * ROW_BYTES, source + chunk * G::STAGE_COLUMNS, row < exist);
        }
    }
};

}  // namespace prefill
