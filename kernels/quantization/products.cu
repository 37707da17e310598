// Products of calibration rows in float32: what linear layers give for them, and how their columns go together.

constexpr int TILE = 128, DEPTH = 16, OWN = 8, THREADS = 256;

// Tiles of TILE times DEPTH in shared memory, DEPTH first: element [k][i] is that of row `first` + i of `values` [rows, depth]
// at column `start` + k, zero outside.
__device__ __forceinline__ void load_rows(float (*tile)[TILE + 4], const float* values, int rows, int depth, int first, int start) {
#pragma unroll
    for (int part = threadIdx.x; part < TILE * DEPTH; part += THREADS) {
        const int i = part / DEPTH, k = part % DEPTH;
        const bool inside = first + i < rows && start + k < depth;
        tile[k][i] = inside ? values[static_cast<long long>(first + i) * depth + start + k] : 0;
    }
}

__device__ __forceinline__ void multiply(float (*sums)[OWN], const float (*left)[TILE + 4], const float (*right)[TILE + 4], int down, int along) {
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
        float a[OWN], b[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) a[i] = left[k][down + 16 * i], b[i] = right[k][along + 16 * i];
#pragma unroll
        for (int i = 0; i < OWN; ++i)
#pragma unroll
            for (int j = 0; j < OWN; ++j) sums[i][j] += a[i] * b[j];
    }
}

// outputs [M, N] = inputs [M, K] times the transpose of weights [N, K]: grid (N / 128, M / 128).
extern "C" __global__ void __launch_bounds__(THREADS) linear_rows(const float* inputs, const float* weights, float* outputs, int m, int n, int k) {
    __shared__ float left[DEPTH][TILE + 4], right[DEPTH][TILE + 4];
    const int first = blockIdx.y * TILE, second = blockIdx.x * TILE, down = threadIdx.x / 16, along = threadIdx.x % 16;
    float sums[OWN][OWN] = {};
    for (int start = 0; start < k; start += DEPTH) {
        load_rows(left, inputs, m, k, first, start);
        load_rows(right, weights, n, k, second, start);
        __syncthreads();
        multiply(sums, left, right, down, along);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i)
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            const int row = first + down + 16 * i, column = second + along + 16 * j;
            if (row < m && column < n) outputs[static_cast<long long>(row) * n + column] = sums[i][j];
        }
}

// Adds to products [K / size, size, size] those of the columns of each group, summed over the rows of inputs [M, K], and to
// magnitudes [K] the sums of their absolute values: grid (K / size), size at most 128.
extern "C" __global__ void __launch_bounds__(THREADS) add_moments(const float* inputs, float* products, float* magnitudes, int m, int k, int size) {
    __shared__ float tile[DEPTH][TILE + 4];
    const int group = blockIdx.x, down = threadIdx.x / 16, along = threadIdx.x % 16;
    float sums[OWN][OWN] = {}, magnitude = 0;
    for (int start = 0; start < m; start += DEPTH) {
#pragma unroll
        for (int part = threadIdx.x; part < TILE * DEPTH; part += THREADS) {
            const int row = start + part / TILE, column = part % TILE;
            const bool inside = row < m && column < size;
            tile[part / TILE][column] = inside ? inputs[static_cast<long long>(row) * k + group * size + column] : 0;
        }
        __syncthreads();
        multiply(sums, tile, tile, down, along);
        if (threadIdx.x < size)
            for (int row = 0; row < DEPTH; ++row) magnitude += fabsf(tile[row][threadIdx.x]);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i)
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            const int row = down + 16 * i, column = along + 16 * j;
            if (row < size && column < size) products[(static_cast<long long>(group) * size + row) * size + column] += sums[i][j];
        }
    if (threadIdx.x < size) magnitudes[group * size + threadIdx.x] += magnitude;
}
