// Searches the scale with which each group of a weight loses least, and rounds with it: engines/quantizer/rounding.py says how.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr int WARPS = 4, WARP_ROWS = 8;
constexpr float LARGEST = 3.402823466e38f;

// weights float [rows, columns]; factors of each group [size, size], or of each column, or null; shares of the largest scale
// that are tried; scales, zeros float [rows, groups]; codes [rows, columns]. `last` is the largest code.
struct Search {
    const float *weights, *factors, *shares;
    float *scales, *zeros;
    unsigned char* codes;
    long long columns;
    int rows, share_count;
    float last;
};
static_assert(sizeof(Search) == HOST_SEARCH_BYTES, "as the host's structure");

template <typename T> struct Stored;
template <> struct Stored<__half> {
    static __device__ float rounded(float value) { return __half2float(__float2half_rn(value)); }
    static constexpr float SMALLEST = 5.9604644775390625e-8f;
};
template <> struct Stored<__nv_bfloat16> {
    static __device__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }
    static constexpr float SMALLEST = 1.17549435e-38f;
};
template <> struct Stored<float> {
    static __device__ float rounded(float value) { return value; }
    static constexpr float SMALLEST = 1.17549435e-38f;
};

// What is tried of a group: a code q stands for q scale, q from `low` to `high`.
struct Candidate {
    float scale, low, high;
};

// A group's largest scale, the candidates, and the best of them so far.
template <typename T, bool ZEROS> struct Group {
    static constexpr int VARIANTS = ZEROS ? 3 : 2;
    float lowest, largest, last, best = LARGEST, scale = 1, zero;

    __device__ Group(float least, float most, float last) : last(last) {
        const float middle = (last + 1) / 2;
        lowest = fminf(least, 0);
        largest = ZEROS ? (fmaxf(most, 0) - lowest) / last : fmaxf(most, -least) / (middle - 1);
        zero = ZEROS ? 0 : middle;
    }

    // Of the scale's two signs, or of the nearest zero point and those beside it.
    __device__ Candidate candidate(float share, int variant) const {
        float tried = fmaxf(Stored<T>::rounded(largest * share), Stored<T>::SMALLEST);
        if (largest == 0) tried = 1;
        if (ZEROS) {
            const float beside = variant == 0 ? 0 : variant == 1 ? -1 : 1;
            const float origin = fminf(fmaxf(rintf(-lowest * share / tried) + beside, 0), last);
            return {tried, -origin, last - origin};
        }
        const float low = variant == 0 ? -zero : 1 - zero;
        return {tried, low, low + last};
    }

    __device__ void keep_better(const Candidate& tried, int variant, float squares) {
        const float error = squares * (tried.scale * tried.scale);
        if (!(error < best)) return;
        best = error;
        scale = !ZEROS && variant == 1 ? -tried.scale : tried.scale;
        if (ZEROS) zero = -tried.low;
    }

    __device__ unsigned char code(float weight) const {
        return static_cast<unsigned char>(fminf(fmaxf(rintf(weight / scale) + zero, 0), last));
    }
};

__device__ __forceinline__ float difference(float weight, const Candidate& tried) {
    const float steps = weight / tried.scale;
    return fminf(fmaxf(rintf(steps), tried.low), tried.high) - steps;
}

template <typename Operation> __device__ __forceinline__ float over_warp(float value, Operation operation) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value = operation(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;
}
__device__ __forceinline__ float least(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ float most(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float sum(float a, float b) { return a + b; }

// Groups of SIZE columns with a factor matrix each: grid (groups, rows / 32). A warp has eight rows of the group, each lane
// SIZE / 32 columns of them; shared memory holds the matrix, the weights and their differences.
template <typename T, int SIZE, bool ZEROS> __global__ void __launch_bounds__(32 * WARPS) search_groups(const Search arguments) {
    constexpr int OWN = SIZE / 32;
    extern __shared__ float shared[];
    float* factors = shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = blockIdx.x;
    float* weights = factors + SIZE * SIZE + warp * 2 * WARP_ROWS * SIZE;
    float* errors = weights + WARP_ROWS * SIZE;
    for (int place = threadIdx.x; place < SIZE * SIZE; place += 32 * WARPS)
        factors[place] = arguments.factors[static_cast<long long>(group) * SIZE * SIZE + place];
    const int first = (blockIdx.y * WARPS + warp) * WARP_ROWS, groups = gridDim.x;
    for (int row = 0; row < WARP_ROWS; ++row)
        for (int own = 0; own < OWN; ++own) {
            const int column = own * 32 + lane;
            const long long place = (first + row) * arguments.columns + group * SIZE + column;
            weights[row * SIZE + column] = first + row < arguments.rows ? arguments.weights[place] : 0;
        }
    __syncthreads();
    float lows[WARP_ROWS], highs[WARP_ROWS];
#pragma unroll
    for (int row = 0; row < WARP_ROWS; ++row) {
        lows[row] = LARGEST, highs[row] = -LARGEST;
        for (int own = 0; own < OWN; ++own) {
            const float weight = weights[row * SIZE + own * 32 + lane];
            lows[row] = fminf(lows[row], weight), highs[row] = fmaxf(highs[row], weight);
        }
        lows[row] = over_warp(lows[row], least), highs[row] = over_warp(highs[row], most);
    }
    using Own = Group<T, ZEROS>;
    const float last = arguments.last;
    Own rows[WARP_ROWS] = {{lows[0], highs[0], last}, {lows[1], highs[1], last}, {lows[2], highs[2], last}, {lows[3], highs[3], last},
                           {lows[4], highs[4], last}, {lows[5], highs[5], last}, {lows[6], highs[6], last}, {lows[7], highs[7], last}};
    for (int share = 0; share < arguments.share_count; ++share)
        for (int variant = 0; variant < Own::VARIANTS; ++variant) {
#pragma unroll
            for (int row = 0; row < WARP_ROWS; ++row) {
                const Candidate tried = rows[row].candidate(arguments.shares[share], variant);
#pragma unroll
                for (int own = 0; own < OWN; ++own) {
                    const int place = row * SIZE + own * 32 + lane;
                    errors[place] = difference(weights[place], tried);
                }
            }
            __syncwarp();
            float sums[WARP_ROWS][OWN] = {};
            for (int k = 0; k < SIZE; k += 4) {
                float4 left[WARP_ROWS];
#pragma unroll
                for (int row = 0; row < WARP_ROWS; ++row) left[row] = *reinterpret_cast<const float4*>(errors + row * SIZE + k);
#pragma unroll
                for (int inner = 0; inner < 4; ++inner)
#pragma unroll
                    for (int own = 0; own < OWN; ++own) {
                        const float right = factors[(k + inner) * SIZE + own * 32 + lane];
#pragma unroll
                        for (int row = 0; row < WARP_ROWS; ++row) sums[row][own] += (&left[row].x)[inner] * right;
                    }
            }
            __syncwarp();
#pragma unroll
            for (int row = 0; row < WARP_ROWS; ++row) {
                float squares = 0;
#pragma unroll
                for (int own = 0; own < OWN; ++own) squares += sums[row][own] * sums[row][own];
                rows[row].keep_better(rows[row].candidate(arguments.shares[share], variant), variant, over_warp(squares, sum));
            }
        }
#pragma unroll
    for (int row = 0; row < WARP_ROWS; ++row) {
        if (first + row >= arguments.rows) continue;
        const long long place = static_cast<long long>(first + row) * groups + group;
        if (lane == 0) arguments.scales[place] = rows[row].scale, arguments.zeros[place] = rows[row].zero;
        for (int own = 0; own < OWN; ++own) {
            const int column = own * 32 + lane;
            arguments.codes[(first + row) * arguments.columns + group * SIZE + column] = rows[row].code(weights[row * SIZE + column]);
        }
    }
}

// Groups of `size` columns, or whole rows, whose columns count by themselves: grid (rows * groups / 4), a warp a group.
template <typename T, bool ZEROS> __global__ void __launch_bounds__(32 * WARPS) search_columns(const Search arguments, int size) {
    const int lane = threadIdx.x % 32, groups = arguments.columns / size;
    const long long index = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (index >= static_cast<long long>(arguments.rows) * groups) return;
    const long long place = index / groups * arguments.columns + index % groups * size;
    const float *weights = arguments.weights + place, *factors = arguments.factors + index % groups * size;
    float low = LARGEST, high = -LARGEST;
    for (int column = lane; column < size; column += 32) low = fminf(low, weights[column]), high = fmaxf(high, weights[column]);
    Group<T, ZEROS> group(over_warp(low, least), over_warp(high, most), arguments.last);
    for (int share = 0; share < arguments.share_count; ++share)
        for (int variant = 0; variant < Group<T, ZEROS>::VARIANTS; ++variant) {
            const Candidate tried = group.candidate(arguments.shares[share], variant);
            float squares = 0;
            for (int column = lane; column < size; column += 32) {
                const float error = difference(weights[column], tried) * (arguments.factors ? factors[column] : 1);
                squares += error * error;
            }
            group.keep_better(tried, variant, over_warp(squares, sum));
        }
    if (lane == 0) arguments.scales[index] = group.scale, arguments.zeros[index] = group.zero;
    for (int column = lane; column < size; column += 32) arguments.codes[place + column] = group.code(weights[column]);
}
