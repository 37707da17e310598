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
