// The sum of what ranks have, by plain loads and stores in each other's memory.
//
// A rank writes what it has into the inbox of each other one, then raises a flag there; it waits for the flags of the others
// in its own memory, and reads what they wrote. All launch the same sums with the same grid: block b of one has to do with
// block b of the others alone, so nothing waits for a whole grid. A round is one message of a block.
//
// Flags count rounds in the memory of the ranks, so that a captured launch can be repeated. Messages of two rounds have two
// places: who has seen the flags of a round knows that all have read those of the round before it.
#include "shared/elements.cuh"
#include "shared/programmatic_launch.cuh"

namespace ranks {

constexpr int MOST = HOST_MOST_RANKS, THREADS = HOST_THREADS, DEPTH = HOST_DEPTH, MOST_BLOCKS = HOST_MOST_BLOCKS;

// A rank, and where the others read and write. `inboxes[q]` and `flags[q]` are in the memory of rank q: [2][count]
// [MOST_BLOCKS][DEPTH][THREADS] pieces of four floats, and [MOST_BLOCKS][count] rounds.
struct Ranks {
    float4* inboxes[MOST];
    unsigned* flags[MOST];
    unsigned* rounds;   // [MOST_BLOCKS]: of this rank's blocks, so far
    unsigned* stopped;  // [1]: whether this rank has waited in vain
    unsigned* missed;   // [1] in memory that the host sees: 1 + the rank that did not come
    long long limit;    // nanoseconds that a round waits
    int own, count;
    int early;   // whether the next kernel may start before the others came: not where ranks share a GPU
    int blocks;  // the most of a launch
};
static_assert(sizeof(Ranks) == HOST_RANKS_BYTES, "the host packs ranks otherwise");

__device__ __forceinline__ void store_piece(float4* place, const float4& piece) {
    asm volatile("st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(place), "f"(piece.x), "f"(piece.y),
                 "f"(piece.z), "f"(piece.w)
                 : "memory");
}

__device__ __forceinline__ float4 load_piece(const float4* place) {
    float4 piece;
    asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(piece.x), "=f"(piece.y), "=f"(piece.z), "=f"(piece.w)
                 : "l"(place)
                 : "memory");
    return piece;
}

__device__ __forceinline__ long long nanoseconds() {
    long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}

// Raises the flag of this block in the memory of `other`: what the block has written before its last barrier is there.
__device__ __forceinline__ void raise_flag(const Ranks& ranks, int other, unsigned round) {
    unsigned* flag = ranks.flags[other] + blockIdx.x * ranks.count + ranks.own;
    __threadfence_system();
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(round) : "memory");
}

// Whether `other` has raised its flag within the time; else the host is told which rank did not.
__device__ __forceinline__ bool await_flag(const Ranks& ranks, int other, unsigned round) {
    const unsigned* flag = ranks.flags[ranks.own] + blockIdx.x * ranks.count + other;
    const long long begun = nanoseconds();
    do {
        unsigned seen;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        if (static_cast<int>(seen - round) >= 0) return true;
    } while (nanoseconds() - begun <= ranks.limit);
    *reinterpret_cast<volatile unsigned*>(ranks.missed) = 1 + other;
    *reinterpret_cast<volatile unsigned*>(ranks.stopped) = 1;
    __threadfence_system();
    return false;
}

// Four of a residual's elements, which are of T or of float.
template <typename T>
__device__ __forceinline__ void load_residual(const void* residual, bool is_float, long long piece, float (&four)[4]) {
    if (is_float) {
        *reinterpret_cast<float4*>(four) = __ldcg(static_cast<const float4*>(residual) + piece);
        return;
    }
    const uint2 bits = __ldcg(static_cast<const uint2*>(residual) + piece);
#pragma unroll
    for (int j = 0; j < 4; ++j) four[j] = to_float(reinterpret_cast<const T*>(&bits)[j]);
}

// output [n] float = residual [n], if there is one, + scale times the sum of all ranks' values [n] float, in the order of
// ranks wherever it is computed; every product and sum is rounded by itself. n is four times `pieces`, of which a thread has
// up to `depth` in a round, at most TURNS. The output may be the values or the residual.
template <typename T, int TURNS>
__global__ void __launch_bounds__(THREADS)
    sum_ranks(const __grid_constant__ Ranks ranks, const float4* values, float4* output, const void* residual,
              int residual_is_float, float scale, long long pieces, int depth) {
    if (ranks.early) launch_next_kernel();
    wait_for_previous_kernel();
    unsigned round = __ldcg(ranks.rounds + blockIdx.x);
    if (__syncthreads_or(__ldcg(ranks.stopped))) return;
    const long long of_block = static_cast<long long>(THREADS) * depth, step = of_block * gridDim.x;
    for (long long first = blockIdx.x * of_block; first < pieces; first += step) {
        const unsigned side = round++ & 1;
        const auto place = [&](int receiver, int sender, int turn) {
            const size_t slot = (static_cast<size_t>(side) * ranks.count + sender) * MOST_BLOCKS + blockIdx.x;
            return ranks.inboxes[receiver] + (slot * DEPTH + turn) * THREADS + threadIdx.x;
        };
        float4 own[TURNS];
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const long long piece = first + turn * THREADS + threadIdx.x;
            if (turn >= depth || piece >= pieces) continue;
            own[turn] = __ldcg(values + piece);
            for (int rank = 0; rank < ranks.count; ++rank)
                if (rank != ranks.own) store_piece(place(rank, ranks.own, turn), own[turn]);
        }
        __syncthreads();
        const int other = threadIdx.x;
        const bool is_other = other < ranks.count && other != ranks.own;
        if (is_other) raise_flag(ranks, other, round);
        __syncwarp();
        const bool all_came = !is_other || await_flag(ranks, other, round);
        if (__syncthreads_or(!all_came)) return;
        // On one GPU not before: what starts early takes room that others need to come.
        if (!ranks.early && first + step >= pieces) launch_next_kernel();
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const long long piece = first + turn * THREADS + threadIdx.x;
            if (turn >= depth || piece >= pieces) continue;
            float sums[4], before[4];
            for (int rank = 0; rank < ranks.count; ++rank) {
                const float4 part = rank == ranks.own ? own[turn] : load_piece(place(ranks.own, rank, turn));
                const float parts[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[j] = rank == 0 ? parts[j] : __fadd_rn(sums[j], parts[j]);
            }
            if (residual != nullptr) load_residual<T>(residual, residual_is_float, piece, before);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                sums[j] = __fmul_rn(scale, sums[j]);
                if (residual != nullptr) sums[j] = __fadd_rn(before[j], sums[j]);
            }
            output[piece] = make_float4(sums[0], sums[1], sums[2], sums[3]);
        }
    }
    if (threadIdx.x == 0) ranks.rounds[blockIdx.x] = round;
}

// What stands in a stream where several have come together: the next kernel has one predecessor.
extern "C" __global__ void joined() {}

}  // namespace ranks
