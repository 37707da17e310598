// Rows times a weight [K, C], which is published so: few of an encoder's products are. Sums run over K from its beginning,
// in float, whatever the tiles.
#include "encoder/values.cuh"

namespace encoder {

constexpr int TILE = HOST_TILE, DEPTH = 16, SIDE = 16, OWN = TILE / SIDE;  // of a block's threads, and of each thread's sums
static_assert(SIDE * SIDE == THREADS && DEPTH * TILE % THREADS == 0, "threads share loads and sums evenly");

// Grid: tiles of columns, tiles of rows. A thread has rows SIDE apart, and columns SIDE apart.
template <class In, class Compute, class Out>
__global__ void __launch_bounds__(THREADS) product(const __grid_constant__ ProductArguments a) {
    __shared__ float values[DEPTH][TILE + 1], weights[DEPTH][TILE];
    const unsigned first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
    const unsigned own_row = threadIdx.x / SIDE, own_column = threadIdx.x % SIDE;
    float sums[OWN][OWN] = {};
    begin();
    for (unsigned begins = 0; begins < a.K; begins += DEPTH) {
        for (unsigned i = threadIdx.x; i < DEPTH * TILE; i += THREADS) {
            float one[1] = {}, other[1] = {};
            const unsigned row = i / DEPTH, k = i % DEPTH, column = i % TILE, depth = i / TILE;
            if (first_row + row < a.R && begins + k < a.K)
                load<In, 1>(a.values, size_t(first_row + row) * a.K + begins + k, one);
            if (first_column + column < a.C && begins + depth < a.K)
                load<Compute, 1>(a.weight, size_t(begins + depth) * a.C + first_column + column, other);
            values[k][row] = one[0], weights[depth][column] = other[0];
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            float left[OWN], right[OWN];
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                left[i] = values[k][own_row + SIDE * i], right[i] = weights[k][own_column + SIDE * i];
#pragma unroll
            for (int i = 0; i < OWN; ++i)
#pragma unroll
                for (int j = 0; j < OWN; ++j) sums[i][j] = fmaf(left[i], right[j], sums[i][j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i)
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            const unsigned row = first_row + own_row + SIDE * i, column = first_column + own_column + SIDE * j;
            const float scaled[1] = {sums[i][j] * float(a.scale)};
            if (row < a.R && column < a.C) store<Out, 1>(a.output, size_t(row) * a.C + column, scaled);
        }
}

}  // namespace encoder
