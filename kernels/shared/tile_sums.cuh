// The sums of a tile of a product by tensor cores that a thread has: four of each of its fragments of 16 rows and 8
// columns. G: a geometry with so many fragments, ROW_TILES and COLUMN_TILES.
#pragma once

template <typename G> using Sums = float[G::ROW_TILES][G::COLUMN_TILES][4];

template <typename G, typename Action> __device__ __forceinline__ void for_each_sum(const Action& action) {
#pragma unroll
    for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
        for (int c = 0; c < G::COLUMN_TILES; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) action(r, c, i);
}

// Adds to a sum what another one holds, which then begins anew.
template <typename G> __device__ __forceinline__ void add_to(Sums<G>& sum, Sums<G>& other) {
    for_each_sum<G>([&](int r, int c, int i) { sum[r][c][i] += other[r][c][i], other[r][c][i] = 0.f; });
}

// Which of a tile a warp has: its first row of activations, and its place among the warps that have weight rows beside
// each other. PAIRED: the second half of the tile's weight rows, UNIT of them, is every second of the warp's tiles.
template <typename G> struct WarpTiles {
    int row, column_warp;

    // The first weight row of the warp's tile `c`.
    __device__ int tile_row(int c) const {
        const int tile = column_warp * G::COLUMN_TILES + c;
        return G::PAIRED ? tile % 2 * G::UNIT + tile / 2 * 8 : tile * 8;
    }
};

// One of two types, such as where sums lie.
template <bool, typename First, typename> struct Choose { using type = First; };
template <typename First, typename Second> struct Choose<false, First, Second> { using type = Second; };
