// Packed weights of linear.cu: their blocks come into shared memory as they are, and a warp makes fragments of them in
// registers when it multiplies them, with the bits that decode/packed_codes.cuh gives.
//
// Weights are the left operands of the tensor cores here, as the registers in which codes become values can be: none is
// moved. So a thread has the sums of two rows of activations times a weight row, which `turn` makes at the end what the
// dense kernels have: of a row of activations two weight rows.
#pragma once
#include "prefill/linear_tiles.cuh"

namespace prefill {

// What a thread copies of the blocks of packed weights: of its warp's tiles of eight rows 16 bytes of the codes, and of
// what follows these some pieces.
template <typename T, typename G> struct PackedCopies {
    using Format = packed::Format<G::SCALES, G::MODE>;
    static constexpr int WARPS = G::THREADS / 32, TILES = G::UNIT / 8, EACH = (TILES + WARPS - 1) / WARPS;
    static constexpr int PIECES = Format::TAIL_BYTES / 16, ALL_PIECES = G::SUMS * TILES * PIECES;
    static constexpr int ROUNDS = (ALL_PIECES + G::THREADS - 1) / G::THREADS;
    unsigned codes, tails[ROUNDS];  // bytes from the weight's begin on, in the first block of a line
    int tiles;                      // that exist from the warp's first on

    static __device__ int blocks_of(const Operands<T>& operands) {  // of a line
        return (operands.columns + packed::BLOCK_COLUMNS - 1) / packed::BLOCK_COLUMNS;
    }
    static __device__ int row_tiles_of(const Operands<T>& operands) { return (operands.rows + 7) / 8; }
    static __device__ int piece_of(int round) { return round * G::THREADS + threadIdx.x; }
    __device__ void begin_tile(const Operands<T>& operands, const Place& place, int, int) {
        const int row_tiles = row_tiles_of(operands), first = place.column / 8, warp = threadIdx.x / 32;
        const unsigned line_bytes = blocks_of(operands) * Format::BLOCK_BYTES, to_ups = row_tiles * line_bytes;
        codes = (first + warp) * line_bytes + threadIdx.x % 32 * 16;
        tiles = row_tiles - first - warp;
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {  // of rows behind the last one the last, which nobody writes
            const int tile = piece_of(round) / PIECES, own = min(first + tile % TILES, row_tiles - 1);
            const int within = Format::TAIL_BEGIN + piece_of(round) % PIECES * 16;
            tails[round] = own * line_bytes + tile / TILES * to_ups + within;
        }
    }
    // Of a chunk, a team's, which begins at `stage`. Behind the last block are zeros.
    __device__ void copy(const Operands<T>& operands, int team, int chunk, unsigned stage, unsigned, bool) const {
        const int lane = threadIdx.x % 32, block = team * (operands.team_columns / packed::BLOCK_COLUMNS) + chunk;
        const char* begin = reinterpret_cast<const char*>(operands.weight);
        const unsigned behind = block * Format::BLOCK_BYTES;
        const int blocks = blocks_of(operands);
        const unsigned line_bytes = blocks * Format::BLOCK_BYTES, to_ups = row_tiles_of(operands) * line_bytes;
        const bool exists = block < blocks;
#pragma unroll
        for (int s = 0; s < G::SUMS; ++s)
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int before = i * WARPS, tile = threadIdx.x / 32 + before;
                if (TILES % WARPS != 0 && tile >= TILES) break;
                const char* source = begin + (codes + s * to_ups + before * line_bytes + behind);
                const unsigned target = stage + (s * TILES + tile) * Format::BLOCK_BYTES + lane * 16;
#pragma unroll
                for (int piece = 0; piece < Format::TAIL_BEGIN; piece += 512)
                    copy_async_16(target + piece, source + piece, exists && before < tiles);
            }
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const int piece = piece_of(round);
            if (ALL_PIECES % G::THREADS != 0 && piece >= ALL_PIECES) break;
            const unsigned place = piece / PIECES * Format::BLOCK_BYTES + Format::TAIL_BEGIN + piece % PIECES * 16;
            copy_async_16(stage + place, begin + (tails[round] + behind), exists);
        }
    }
    __device__ void advance() {}
};

// A block of weights of a stage.
struct StagedBlock {
    const char* begin;
    template <typename Bytes> __device__ __forceinline__ void read(int place, Bytes& bytes) const {
        bytes = *reinterpret_cast<const Bytes*>(begin + place);
    }
};

// What a warp multiplies of packed weights in a step of 32 columns: pairs of weight tiles, of which the next becomes
// values while one is multiplied. `sums.slice[r][c]` is that of the pair c / 2 and of eight rows of activations, number
// 2 r + c % 2. A lane has its codes of all four steps of a stage.
template <typename T, typename G> struct PackedFragments {
    static constexpr int PAIRS = G::COLUMN_TILES / 2, TILES = 2 * G::ROW_TILES;
    uint4 activations[TILES];
    unsigned weights[2][2][4];
    packed::Lane<G::SCALES, G::MODE> blocks[G::COLUMN_TILES];
    packed::Group<T, G::MODE> groups[G::COLUMN_TILES];
    unsigned mask;

    __device__ explicit PackedFragments(unsigned zero) : mask(packed::LOW | zero) {}
    __device__ void read_blocks(const char* stage, const Lane<G>& lane) {
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; ++c)
            blocks[c].read(StagedBlock{stage + lane.tile_row(c) / 8 * G::BLOCK_BYTES});
    }
    __device__ void read_activations(const char* stage, const Lane<G>& lane, int step, int tile) {
        const char* rows = stage + G::INPUT_BEGIN + step * G::STEP_BYTES + (lane.row + tile * 8) * ROW_BYTES;
        activations[tile] = *reinterpret_cast<const uint4*>(rows + threadIdx.x % 32 * 16);
    }
    // Makes values of a pair's codes.
    __device__ void dequantize(int step, int pair) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int c = 2 * pair + i;
            blocks[c].begin(groups[c], step, mask);
            blocks[c].values(groups[c], step, mask, weights[(step * PAIRS + pair) % 2][i]);
        }
    }
    __device__ void begin() {}  // a step: what it multiplies stands where the tensor cores take it
    // What the first step begins with.
    __device__ void read(const char* stage, const Lane<G>& lane) {
        read_blocks(stage, lane);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) read_activations(stage, lane, 0, tile);
        dequantize(0, 0);
    }
    // Multiplies the step number STEP of a stage, adding to `sums`, and reads what the next one begins with: `next` is
    // the next stage once it has come.
    template <int BEGINS, int STEP, typename Its, typename Next>
    __device__ void multiply(Its& sums, const char* stage, const Lane<G>& lane, const Next& next) {
        constexpr int FOLLOWING = (STEP + 1) % G::STAGE_STEPS;
        const auto nothing = [](int) {};
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            if (pair + 1 < PAIRS) {
                multiply_pair<BEGINS, STEP>(sums, pair, 0, nothing);
                dequantize(STEP, pair + 1);
                multiply_pair<BEGINS, STEP>(sums, pair, 1, nothing);
                continue;
            }
            const char* after = stage;
            if (FOLLOWING == 0) {
                after = next();
                read_blocks(after, lane);  // all of the stage before are values
            }
            multiply_pair<BEGINS, STEP>(sums, pair, 0, nothing);
            dequantize(FOLLOWING, 0);
            const auto read_next = [&](int tile) { read_activations(after, lane, FOLLOWING, tile); };
            multiply_pair<BEGINS, STEP>(sums, pair, 1, read_next);
        }
    }

  private:
    // Multiplies one half of a step's columns by a pair of weight tiles; `then` follows each tile of activations.
    template <int BEGINS, int STEP, typename Its, typename Then>
    __device__ void multiply_pair(Its& sums, int pair, int half, const Then& then) {
        const unsigned(&low)[4] = weights[(STEP * PAIRS + pair) % 2][0];
        const unsigned(&high)[4] = weights[(STEP * PAIRS + pair) % 2][1];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const int r = tile / 2, c = 2 * pair + tile % 2;
            if (half == 0) sums.template begin<BEGINS>(r, c);
            const uint4& own = activations[tile];
            multiply_rows(sums.slice[r][c], low[2 * half], high[2 * half], low[2 * half + 1], high[2 * half + 1],
                          half == 0 ? own.x : own.z, half == 0 ? own.y : own.w, T());
            then(tile);
        }
    }
};

// A matrix of 8 x 8 elements of 16 bits that a warp has, two to a lane, transposed.
__device__ __forceinline__ unsigned transposed(unsigned pair) {
    unsigned result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

// The same of elements of 32 bits: their halves are such matrices.
__device__ __forceinline__ void transpose(float& first, float& second) {
    const unsigned one = __float_as_uint(first), two = __float_as_uint(second);
    const unsigned lower = transposed(packed::bytes_of(one, two, 0x5410));
    const unsigned upper = transposed(packed::bytes_of(one, two, 0x7632));
    first = __uint_as_float(packed::bytes_of(lower, upper, 0x5410));
    second = __uint_as_float(packed::bytes_of(lower, upper, 0x7632));
}

// Sums that `PackedFragments` made, where `Lane` says that they stand.
template <typename G> __device__ __forceinline__ void turn(Sums<G>& sums) {
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; c += 2) {
            float(&one)[4] = sums[r][c], (&two)[4] = sums[r][c + 1];
            transpose(one[0], one[1]), transpose(one[2], one[3]), transpose(two[0], two[1]), transpose(two[2], two[3]);
            const float first = one[2], second = one[3];
            one[2] = two[0], one[3] = two[1], two[0] = first, two[1] = second;
        }
}

// What kernels of dense weights, and of packed ones, take of them.
template <typename T, typename G, bool = G::IS_PACKED> struct WeightsOf {
    using Copies = DenseCopies<T, G>;
    using Fragments = DenseFragments<T, G>;
};
template <typename T, typename G> struct WeightsOf<T, G, true> {
    using Copies = PackedCopies<T, G>;
    using Fragments = PackedFragments<T, G>;
};

}  // namespace prefill
