// How weights and activations of packed_tiles.cu come into shared memory: weights each warp's own, activations for the
// warps of a team.
#pragma once
#include "decode/packed_warps.cuh"

namespace decode {
namespace packed {

// ROW_WARPS make a team, K_WARPS teams share K. Activations come in a ring of STAGES of CHUNK steps for each team; of 0: they
// are copied once, for all tiles, and stay. STEPS of a slice. The others: see WarpTile.
template <int TOKEN_TILES, int WEIGHT_TILES, int ROW_WARPS_, int K_WARPS_, int DEPTH, int STAGES_, int CHUNK_, int STEPS_,
          int SCALES, int MODE, bool PAIRED>
struct TileGeometry : WarpTile<TOKEN_TILES, WEIGHT_TILES, DEPTH, SCALES, MODE, PAIRED> {
    using Tile = WarpTile<TOKEN_TILES, WEIGHT_TILES, DEPTH, SCALES, MODE, PAIRED>;
    static constexpr int ROW_WARPS = ROW_WARPS_, K_WARPS = K_WARPS_, STAGES = STAGES_, CHUNK = CHUNK_, STEPS = STEPS_;
    static constexpr int EVERY = STEPS % 4 == 0 ? 4 : STEPS % 2 == 0 ? 2 : 1;  // slices end only behind so many steps
    static constexpr int THREADS = 32 * ROW_WARPS * K_WARPS, UNIT = Tile::WARP_UNIT * ROW_WARPS;
    static constexpr int OWN_BLOCKS = SLICES * STEPS / BLOCK_STEPS / K_WARPS;  // of a team, of each row
    static constexpr bool STAYS = STAGES == 0, IN_PARTS = true;
    // Tiles of activations whose products alternate.
    static constexpr int EVEN = TOKEN_TILES % 2 == 0 ? 2 : TOKEN_TILES, MANY = TOKEN_TILES % 4 == 0 ? 4 : EVEN;
    static constexpr int TOGETHER = TOKEN_TILES * WEIGHT_TILES <= 6 ? TOKEN_TILES : WEIGHT_TILES == 1 ? MANY : EVEN;
    static constexpr int CHUNK_BYTES = CHUNK * Tile::STEP_BYTES;  // of activations, a team's
    static constexpr int INPUT_BYTES = STAYS ? OWN_BLOCKS * BLOCK_STEPS * Tile::STEP_BYTES : STAGES * CHUNK_BYTES;
    // Where a warp has all of K, its sums over the groups that have ended lie in shared memory if registers have no room.
    static constexpr int FRAGMENTS = WEIGHT_TILES * TOKEN_TILES;  // of sums, four each
    static constexpr bool ALL = K_WARPS == 1, LEAVES_TOTAL = ALL && FRAGMENTS > 8;
    static constexpr int STRIDE = 16 * WEIGHT_TILES * ROW_WARPS + 4;  // against bank conflicts
    static constexpr int PLACES = 8 * TOKEN_TILES * STRIDE;
    // Shared memory: where rows begin, rings of weights, sums [K_WARPS, rows of activations, STRIDE], activations.
    static constexpr int RINGS_BEGIN = 256, AREA_BEGIN = RINGS_BEGIN + THREADS / 32 * DEPTH * Tile::SLOT_BYTES;
    static constexpr int AREA_BYTES = ALL ? LEAVES_TOTAL * 16 * FRAGMENTS * THREADS : K_WARPS * PLACES * 4;
    static constexpr int INPUT_BEGIN = AREA_BEGIN + AREA_BYTES, SHARED_BYTES = INPUT_BEGIN + K_WARPS * INPUT_BYTES;
    static_assert(ALL || K_WARPS == GROUPS || (K_WARPS == SLICES && STEPS % BLOCK_STEPS == 0), "all, groups or slices");
    static_assert(STAYS || STAGES >= 3, "one is read, one has come, one is copied");
    static_assert(STAYS || (DEPTH - 1) * BLOCK_STEPS / CHUNK >= STAGES - 2, "weights come before their activations");
    static_assert(BLOCK_STEPS % CHUNK == 0 && TOKEN_TILES <= 8, "chunks in blocks, places of rows");
    static_assert(ROW_WARPS == 1 || K_WARPS <= 4, "each team has a barrier");
};
static_assert(TileGeometry<8, 2, 2, 4, 3, 5, 1, 4, 1, SMALL, false>::SHARED_BYTES == HOST_JOINED_BYTES &&
                  TileGeometry<8, 2, 8, 1, 2, 0, 1, 4, 1, ZEROS, true>::SHARED_BYTES == HOST_ALL_BYTES,
              "the host gives blocks their shared memory");

// Behind which what the warps of a team have copied is seen by all of them.
template <typename G> __device__ __forceinline__ void wait_for_warps() {
    if constexpr (G::ROW_WARPS == 1) __syncwarp();
    else if constexpr (G::K_WARPS == 1) __syncthreads();
    else wait_for_team<32 * G::ROW_WARPS>(own_warp() / G::ROW_WARPS);
}

// The activations of a team's part of K, [steps, TOKEN_TILES, lanes, 16 bytes]: of row lane / 4 of a tile eight columns.
// Behind the last column are zeros; behind the last row any row, whose products nobody reads.
template <typename T, typename G> struct TeamActivations {
    static constexpr int CHUNKS = G::OWN_BLOCKS * BLOCK_STEPS / G::CHUNK;  // of a tile
    const T* input;
    const int* begins;  // of rows, in shared memory
    int columns, first, column, chunks;  // `column`: of the next chunk; `chunks`: that are left to copy
    unsigned memory, target;

    __device__ TeamActivations(const TiledLinear& arguments, const int* begins, int first, int tiles, unsigned memory)
        : input(static_cast<const T*>(arguments.input)), begins(begins), columns(arguments.linear.columns),
          first(first + own_quad() * 8), column(this->first), chunks(CHUNKS * (G::STAYS ? 1 : tiles)),
          memory(memory + own_warp() / G::ROW_WARPS * G::INPUT_BYTES + threadIdx.x % 32 * 16), target(this->memory) {}
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
        if (column >= first + CHUNKS * G::CHUNK * 32) column = first;
        target += G::CHUNK_BYTES;
        if (target == memory + G::INPUT_BYTES) target = memory;
    }
    __device__ unsigned following(unsigned place) const {
        return place + G::STEP_BYTES == memory + G::INPUT_BYTES ? memory : place + G::STEP_BYTES;
    }
};

template <typename G> __device__ __forceinline__ void read_rows(uint4 (&rows)[G::TOGETHER], unsigned place, int first) {
#pragma unroll
    for (int i = 0; i < G::TOGETHER; ++i) rows[i] = read_shared_16(place + (first + i) * 512);
}

}  // namespace packed
}  // namespace decode
