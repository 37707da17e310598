// Pairs of rows and experts sorted by expert, stably: those of an expert in the order of rows, behind them as many of none
// as fill a tile. Nothing is added up by atomics of several warps, so the order follows from the ids alone.
#include "shared/programmatic_launch.cuh"

namespace experts {

constexpr int THREADS = HOST_SORTING_THREADS, WARPS = THREADS / 32, AT_ONCE = 8;  // loads of a thread that are on their way
constexpr unsigned FULL_WARP = 0xffffffffu;

// ids [pairs], `chosen` to a row. Of each row of the tiles: the row and the pair that it is, or -1; of each tile its expert;
// and how many tiles there are.
struct Sorting {
    const int* ids;
    int *rows, *which, *expert, *tiles;
    int pairs, chosen, experts, tile;
};
static_assert(sizeof(Sorting) == HOST_SORTING_BYTES, "as the host's structure");

// Calls `action` with the warp's ids in order, those of a lane each time: number of the pair, and its expert or -1.
template <typename Action> __device__ __forceinline__ void for_each_id(const Sorting& given, const Action& action) {
    const int share = ((given.pairs + WARPS - 1) / WARPS + 31) / 32 * 32;
    const int begin = threadIdx.x / 32 * share, end = min(begin + share, given.pairs);
    for (int first = begin; first < end; first += 32 * AT_ONCE) {
        int ids[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int pair = first + i * 32 + threadIdx.x % 32;
            ids[i] = pair < end ? __ldcg(given.ids + pair) : -1;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const bool exists = static_cast<unsigned>(ids[i]) < static_cast<unsigned>(given.experts);
            action(first + i * 32 + threadIdx.x % 32, exists ? ids[i] : -1);
        }
    }
}

// The sum of the values of the threads before this one.
__device__ __forceinline__ int sum_before(int value, int (&of_warps)[WARPS]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = value;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(FULL_WARP, sum, offset);
        if (lane >= offset) sum += other;
    }
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    int before = sum - value;
    for (int i = 0; i < warp; ++i) before += of_warps[i];
    return before;
}

// One block, which has a thread at least for each expert. Dynamic shared memory: a number for each warp and expert, how many
// of the warp's pairs chose the expert; then where the next of them goes.
__global__ void __launch_bounds__(THREADS) sort_pairs(const __grid_constant__ Sorting given) {
    extern __shared__ int numbers[];
    __shared__ int of_warps[WARPS];
    const int own = threadIdx.x, experts = given.experts;
    int* const of_warp = numbers + threadIdx.x / 32 * experts;
    for (int i = own; i < WARPS * experts; i += THREADS) numbers[i] = 0;
    launch_next_kernel();
    wait_for_previous_kernel();
    __syncthreads();
    for_each_id(given, [&](int, int expert) {
        if (expert >= 0) atomicAdd(of_warp + expert, 1);
    });
    __syncthreads();
    int count = 0;
    if (own < experts)
        for (int warp = 0; warp < WARPS; ++warp) {
            const int its = numbers[warp * experts + own];
            numbers[warp * experts + own] = count, count += its;
        }
    const int tiles = (count + given.tile - 1) / given.tile, before = sum_before(tiles, of_warps);
    if (own == THREADS - 1) *given.tiles = before + tiles;
    if (own < experts) {
        const int first = before * given.tile;
        for (int warp = 0; warp < WARPS; ++warp) numbers[warp * experts + own] += first;
        for (int tile = before; tile < before + tiles; ++tile) given.expert[tile] = own;
        for (int place = first + count; place < (before + tiles) * given.tile; ++place)
            given.rows[place] = given.which[place] = -1;
    }
    __syncthreads();
    for_each_id(given, [&](int pair, int expert) {
        const unsigned same = __match_any_sync(FULL_WARP, expert), lower = (1u << threadIdx.x % 32) - 1;
        const int place = (expert >= 0 ? of_warp[expert] : 0) + __popc(same & lower);
        __syncwarp();  // all have read where the next goes
        if (expert >= 0) {
            if ((same & lower) == 0) of_warp[expert] += __popc(same);
            given.rows[place] = pair / given.chosen, given.which[place] = pair;
        }
        __syncwarp();
    });
}

}  // namespace experts
