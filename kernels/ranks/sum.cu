// The sum of what ranks have, by plain loads and stores in each other's memory.
//
// A rank writes what it has into the inbox of each other one, and finds what they wrote in its own. All launch the same sums
// with the same grid: block b of one has to do with block b of the others alone, so nothing waits for a whole grid. A round
// is one message of a block. Of few elements each float lies beside the number of its round, in eight bytes that are written
// at once: who sees the number has the float, and nothing waits for a fence. Of many, which would be twice the bytes, a
// block raises a flag behind all that it wrote.
//
// Rounds are counted in the memory of the ranks, so that a captured launch can be repeated. Messages of two rounds have two
// places: who has a message of a round knows that its sender has read those of the round before it.
//
// Where GPUs do not reach each other's memory NCCL gathers what all have, in this rank's inbox; then `begun` stands before
// each gather, and `sum_gathered` behind it.
#include "shared/elements.cuh"
#include "shared/programmatic_launch.cuh"

namespace ranks {

constexpr int MOST = HOST_MOST_RANKS, THREADS = HOST_THREADS, DEPTH = HOST_DEPTH, MOST_BLOCKS = HOST_MOST_BLOCKS,
              FEW_BLOCKS = HOST_FEW_BLOCKS;

// A rank, and where the others read and write. `inboxes[q]` and `flags[q]` are in the memory of rank q: [2][count]
// [MOST_BLOCKS][DEPTH][THREADS] pieces of four floats, then [2][count][FEW_BLOCKS][2][THREADS] halves of pieces with their
// round; and [MOST_BLOCKS][count] rounds.
struct Ranks {
    float4* inboxes[MOST];
    unsigned* flags[MOST];
    unsigned* rounds;   // [MOST_BLOCKS]: of this rank's blocks, so far
    unsigned* stopped;  // [1]: whether this rank has waited in vain
    unsigned* missed;   // [2] in memory that the host sees: 1 + the rank that did not come; by NCCL, sums begun and ended
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

// Two floats, each in eight bytes with its round: neither is seen without it.
__device__ __forceinline__ void store_half(float4* place, float first, float second, unsigned round) {
    const auto beside = [&](float value) { return static_cast<unsigned long long>(round) << 32 | __float_as_uint(value); };
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(place), "l"(beside(first)), "l"(beside(second))
                 : "memory");
}

// Whether both have come.
__device__ __forceinline__ bool load_half(const float4* place, float& first, float& second, unsigned round) {
    unsigned long long one, other;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(one), "=l"(other) : "l"(place) : "memory");
    first = __uint_as_float(static_cast<unsigned>(one)), second = __uint_as_float(static_cast<unsigned>(other));
    return one >> 32 == round && other >> 32 == round;
}

// Raises the flag of this block in the memory of `other`: what the block has written before its last barrier is there.
__device__ __forceinline__ void raise_flag(const Ranks& ranks, int other, unsigned round) {
    unsigned* flag = ranks.flags[other] + blockIdx.x * ranks.count + ranks.own;
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(round) : "memory");
}

// Whether `has_come` is true within the time; else the host is told that `other` did not come.
template <typename HasCome>
__device__ __forceinline__ bool await_message(const Ranks& ranks, int other, const HasCome& has_come) {
    const long long begun = nanoseconds();
    do {
        if (has_come()) return true;
    } while (nanoseconds() - begun <= ranks.limit);
    *reinterpret_cast<volatile unsigned*>(ranks.missed) = 1 + other;
    *reinterpret_cast<volatile unsigned*>(ranks.stopped) = 1;
    __threadfence_system();
    return false;
}

__device__ __forceinline__ bool await_flag(const Ranks& ranks, int other, unsigned round) {
    const unsigned* flag = ranks.flags[ranks.own] + blockIdx.x * ranks.count + other;
    return await_message(ranks, other, [&] {
        unsigned seen;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        return static_cast<int>(seen - round) >= 0;
    });
}

__device__ __forceinline__ float4 added(const float4& one, const float4& other) {
    return make_float4(__fadd_rn(one.x, other.x), __fadd_rn(one.y, other.y), __fadd_rn(one.z, other.z),
                       __fadd_rn(one.w, other.w));
}

// Four of a residual's elements as they lie in memory, of float or of two bytes in the first half.
__device__ __forceinline__ float4 load_residual(const void* residual, bool is_float, long long piece) {
    if (is_float) return __ldcg(static_cast<const float4*>(residual) + piece);
    const float2 bits = __ldcg(static_cast<const float2*>(residual) + piece);
    return make_float4(bits.x, bits.y, 0.0f, 0.0f);
}

// `sum` scaled, + those elements of T or of float, if there is a residual.
template <typename T>
__device__ __forceinline__ float4 finished(const float4& sum, float scale, const void* residual, bool is_float,
                                           const float4& before) {
    const float4 scaled = make_float4(__fmul_rn(scale, sum.x), __fmul_rn(scale, sum.y), __fmul_rn(scale, sum.z),
                                      __fmul_rn(scale, sum.w));
    if (residual == nullptr) return scaled;
    if (is_float) return added(before, scaled);
    const T* four = reinterpret_cast<const T*>(&before);
    return added(make_float4(to_float(four[0]), to_float(four[1]), to_float(four[2]), to_float(four[3])), scaled);
}

// output [n] float = residual [n], if there is one, + scale times the sum of all ranks' values [n] float, in the order of
// ranks wherever it is computed; every product and sum is rounded by itself. n is four times `pieces`. The output may be the
// values or the residual.
//
// Of few elements, a piece of each thread: at most FEW_BLOCKS blocks. Threads behind the last do as it does, but write none.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    sum_few(const __grid_constant__ Ranks ranks, const float4* values, float4* output, const void* residual,
            int residual_is_float, float scale, long long pieces) {
    if (ranks.early) launch_next_kernel();
    wait_for_previous_kernel();
    const long long piece = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x, read = min(piece, pieces - 1);
    const float4 own = __ldcg(values + read);
    const unsigned round = __ldcg(ranks.rounds + blockIdx.x) + 1;
    if (__syncthreads_or(__ldcg(ranks.stopped))) return;
    if (threadIdx.x == 0) ranks.rounds[blockIdx.x] = round;  // all have read it
    const auto place = [&](int receiver, int sender) {
        float4* few = ranks.inboxes[receiver] + static_cast<size_t>(2 * MOST_BLOCKS * DEPTH * THREADS) * ranks.count;
        return few + (((round & 1) * ranks.count + sender) * FEW_BLOCKS + blockIdx.x) * 2 * THREADS + threadIdx.x;
    };
#pragma unroll 1
    for (int rank = 0; rank < ranks.count; ++rank) {
        if (rank == ranks.own) continue;
        store_half(place(rank, ranks.own), own.x, own.y, round);
        store_half(place(rank, ranks.own) + THREADS, own.z, own.w, round);
    }
    float4 before, sum;  // the residual is loaded while messages are under way
    if (residual != nullptr) before = load_residual(residual, residual_is_float, read);
#pragma unroll 1
    for (int rank = 0; rank < ranks.count; ++rank) {
        float4 part = own;
        const float4* found = place(ranks.own, rank);
        const auto has_come = [&] {
            const bool first = load_half(found, part.x, part.y, round);
            return load_half(found + THREADS, part.z, part.w, round) && first;
        };
        if (rank != ranks.own && !await_message(ranks, rank, has_come)) return;
        sum = rank == 0 ? part : added(sum, part);
    }
    if (piece < pieces) output[piece] = finished<T>(sum, scale, residual, residual_is_float, before);
}

// Of many, up to TURNS pieces of a thread in a round. All are loaded before any is used, so that a round waits for one load
// in place of each; what a rank has itself it loads again, as registers would not hold it.
template <typename T, int TURNS>
__global__ void __launch_bounds__(THREADS, 4)  // where 8 ranks share a GPU, all have room
    sum_many(const __grid_constant__ Ranks ranks, const float4* values, float4* output, const void* residual,
             int residual_is_float, float scale, long long pieces) {
    static_assert(TURNS <= DEPTH, "an inbox has fewer places");
    if (ranks.early) launch_next_kernel();
    wait_for_previous_kernel();
    unsigned round = __ldcg(ranks.rounds + blockIdx.x);
    if (__syncthreads_or(__ldcg(ranks.stopped))) return;
    constexpr int OF_BLOCK = THREADS * TURNS;
    for (long long first = static_cast<long long>(blockIdx.x) * OF_BLOCK; first < pieces;
         first += static_cast<long long>(gridDim.x) * OF_BLOCK) {
        const unsigned side = ++round & 1;
        const auto place = [&](int receiver, int sender) {
            const size_t slot = (static_cast<size_t>(side) * ranks.count + sender) * MOST_BLOCKS + blockIdx.x;
            return ranks.inboxes[receiver] + slot * (DEPTH * THREADS) + threadIdx.x;
        };
        const long long begin = first + threadIdx.x;
        const int left = static_cast<int>(min(pieces - begin, static_cast<long long>(OF_BLOCK)));
        float4 parts[TURNS] = {}, sums[TURNS];
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn)
            if (turn * THREADS < left) parts[turn] = __ldcg(values + begin + turn * THREADS);
#pragma unroll 1
        for (int rank = 0; rank < ranks.count; ++rank) {
            if (rank == ranks.own) continue;
            float4* inbox = place(rank, ranks.own);
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn) store_piece(inbox + turn * THREADS, parts[turn]);
        }
        __syncthreads();
        const int other = threadIdx.x;
        const bool is_other = other < ranks.count && other != ranks.own;
        if (is_other) raise_flag(ranks, other, round);
        __syncwarp();
        const bool all_came = !is_other || await_flag(ranks, other, round);
        if (__syncthreads_or(!all_came)) return;
#pragma unroll 1
        for (int rank = 0; rank < ranks.count; ++rank) {
            const float4* found = rank == ranks.own ? values + begin : place(ranks.own, rank);
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn)
                if (turn * THREADS < left) parts[turn] = load_piece(found + turn * THREADS);
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn)
                sums[turn] = rank == 0 ? parts[turn] : added(sums[turn], parts[turn]);
        }
        if (residual != nullptr) {
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn)
                parts[turn] = load_residual(residual, residual_is_float, begin + min(turn * THREADS, left - 1));
        }
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn)
            if (turn * THREADS < left)
                output[begin + turn * THREADS] =
                    finished<T>(sums[turn], scale, residual, residual_is_float, parts[turn]);
    }
    if (threadIdx.x == 0) ranks.rounds[blockIdx.x] = round;
}

// This rank has come to a gather.
extern "C" __global__ void begun(const __grid_constant__ Ranks ranks) {
    wait_for_previous_kernel();
    if (threadIdx.x != 0) return;
    const unsigned round = ranks.rounds[0] + 1;
    ranks.rounds[0] = round;
    *reinterpret_cast<volatile unsigned*>(ranks.missed) = round;
}

// As sums above, of what was gathered: [count][n] float in the inbox. It starts when that is there.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    sum_gathered(const __grid_constant__ Ranks ranks, float4* output, const void* residual, int residual_is_float,
                 float scale, long long pieces) {
    launch_next_kernel();
    wait_for_previous_kernel();
    const float4* gathered = ranks.inboxes[ranks.own];
    const long long first = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    for (long long piece = first; piece < pieces; piece += static_cast<long long>(gridDim.x) * THREADS) {
        float4 before, sum = __ldcg(gathered + piece);
        if (residual != nullptr) before = load_residual(residual, residual_is_float, piece);
#pragma unroll 1
        for (int rank = 1; rank < ranks.count; ++rank) sum = added(sum, __ldcg(gathered + rank * pieces + piece));
        output[piece] = finished<T>(sum, scale, residual, residual_is_float, before);
    }
    if (first == 0) *reinterpret_cast<volatile unsigned*>(ranks.missed + 1) = ranks.rounds[0];
}

// What stands in a stream where several have come together: the next kernel has one predecessor.
extern "C" __global__ void joined() {}

}  // namespace ranks
