// What ranks give each other, by plain loads and stores: sums, columns of rows, and the inputs of a step.
//
// A rank writes what it has into the inbox of each that wants it, then raises a flag there; it waits for the flags of the
// others in its own memory, and reads what they wrote. All launch the same exchanges with the same grid: block b of one
// has to do with block b of the others alone, so nothing waits for a whole grid. A round is one message of a block.
//
// Flags count rounds in the memory of the ranks, so that a captured launch can be repeated. Messages of two rounds have
// two places: who has seen the flags of a round knows that all have read those of the round before it.
#include "shared/elements.cuh"
#include "shared/programmatic_launch.cuh"

namespace ranks {

constexpr int MOST = HOST_MOST_RANKS, THREADS = HOST_THREADS, DEPTH = HOST_DEPTH, MOST_BLOCKS = HOST_MOST_BLOCKS;

// A rank, and where the others read and write. `inboxes[q]` and `flags[q]` are in the memory of rank q: [2][count]
// [MOST_BLOCKS][DEPTH][THREADS] pieces of 16 bytes, and [MOST_BLOCKS][count] rounds.
struct Ranks {
    uint4* inboxes[MOST];
    unsigned* flags[MOST];
    unsigned* rounds;   // [MOST_BLOCKS]: of this rank's blocks, so far
    unsigned* stopped;  // [1]: whether this rank has waited in vain
    unsigned* missed;   // [1] in memory that the host sees: 1 + the rank that did not come
    long long limit;    // nanoseconds that a round waits
    int own, count;
    int early;  // whether the next kernel may start before the others came: not where ranks share a GPU
};
static_assert(sizeof(Ranks) == HOST_RANKS_BYTES, "the host packs ranks otherwise");

__device__ __forceinline__ void store_piece(uint4* place, const uint4& piece) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(place), "r"(piece.x), "r"(piece.y),
                 "r"(piece.z), "r"(piece.w)
                 : "memory");
}

__device__ __forceinline__ uint4 load_piece(const uint4* place) {
    uint4 piece;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
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
    while (true) {
        unsigned seen;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        if (static_cast<int>(seen - round) >= 0) return true;
        if (nanoseconds() - begun > ranks.limit) break;
    }
    *reinterpret_cast<volatile unsigned*>(ranks.missed) = 1 + other;
    *reinterpret_cast<volatile unsigned*>(ranks.stopped) = 1;
    __threadfence_system();
    return false;
}

// Runs a message of `pieces` of 16 bytes, of which a thread has up to `depth` in a round. `Message::send(piece, turn, send)`
// gives what this rank has of a piece to `send(rank, value)`; `receive(piece, turn, inbox)` takes what `inbox(rank)` gives.
template <typename Message>
__device__ __forceinline__ void exchange(const Ranks& ranks, Message& message, long long pieces, int depth) {
    if (ranks.early) launch_next_kernel();
    wait_for_previous_kernel();
    unsigned round = __ldcg(ranks.rounds + blockIdx.x);
    if (__syncthreads_or(__ldcg(ranks.stopped))) return;
    const long long of_block = static_cast<long long>(THREADS) * depth, step = of_block * gridDim.x;
    for (long long first = blockIdx.x * of_block; first < pieces; first += step) {
        const unsigned side = round & 1;
        ++round;
        const auto place = [&](int receiver, int sender, int turn) {
            const size_t slot = (static_cast<size_t>(side) * ranks.count + sender) * MOST_BLOCKS + blockIdx.x;
            return ranks.inboxes[receiver] + (slot * DEPTH + turn) * THREADS + threadIdx.x;
        };
#pragma unroll Message::UNROLLED
        for (int turn = 0; turn < Message::TURNS; ++turn) {
            const long long piece = first + turn * THREADS + threadIdx.x;
            if (turn < depth && piece < pieces)
                message.send(piece, turn, [&](int rank, const uint4& value) {
                    store_piece(place(rank, ranks.own, turn), value);
                });
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
#pragma unroll Message::UNROLLED
        for (int turn = 0; turn < Message::TURNS; ++turn) {
            const long long piece = first + turn * THREADS + threadIdx.x;
            if (turn < depth && piece < pieces)
                message.receive(piece, turn, [&](int rank) { return load_piece(place(ranks.own, rank, turn)); });
        }
    }
    if (threadIdx.x == 0) ranks.rounds[blockIdx.x] = round;
}

// What a rank has of `total` floats, four a piece; the residual is of T, or of float.
template <typename T, int TURNS_>
struct Sum {
    static constexpr int TURNS = TURNS_, UNROLLED = TURNS;
    const Ranks& ranks;
    const float4* values;
    float4* output;
    const void* residual;
    bool residual_is_float;
    float scale;
    float4 own[TURNS];

    template <typename Send>
    __device__ __forceinline__ void send(long long piece, int turn, const Send& send) {
        own[turn] = __ldcg(values + piece);
        const uint4 bits = make_uint4(__float_as_uint(own[turn].x), __float_as_uint(own[turn].y),
                                      __float_as_uint(own[turn].z), __float_as_uint(own[turn].w));
        for (int rank = 0; rank < ranks.count; ++rank)
            if (rank != ranks.own) send(rank, bits);
    }

    // In the order of ranks, wherever it is computed; products and sums are rounded each by itself.
    template <typename Inbox>
    __device__ __forceinline__ void receive(long long piece, int turn, const Inbox& inbox) {
        float sums[4];
        for (int rank = 0; rank < ranks.count; ++rank) {
            float4 part = own[turn];
            if (rank != ranks.own) {
                const uint4 bits = inbox(rank);
                part = make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                                   __uint_as_float(bits.w));
            }
            const float parts[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[j] = rank == 0 ? parts[j] : __fadd_rn(sums[j], parts[j]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[j] = __fmul_rn(scale, sums[j]);
        if (residual != nullptr) {
            float before[4];
            if (residual_is_float) {
                const float4 four = __ldcg(static_cast<const float4*>(residual) + piece);
                before[0] = four.x, before[1] = four.y, before[2] = four.z, before[3] = four.w;
            } else {
                const uint2 bits = __ldcg(static_cast<const uint2*>(residual) + piece);
                const T* four = reinterpret_cast<const T*>(&bits);
#pragma unroll
                for (int j = 0; j < 4; ++j) before[j] = to_float(four[j]);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[j] = __fadd_rn(before[j], sums[j]);
        }
        output[piece] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    }
};

// output [n] float = residual [n], if there is one, + scale times the sum of all ranks' values [n] float; n is four times
// `pieces`. The output may be the values or the residual.
template <typename T, int TURNS>
__global__ void __launch_bounds__(THREADS) sum_ranks(const __grid_constant__ Ranks ranks, const float* values, float* output,
                                                     const void* residual, int residual_is_float, float scale,
                                                     long long pieces, int depth) {
    Sum<T, TURNS> sum{ranks, reinterpret_cast<const float4*>(values), reinterpret_cast<float4*>(output), residual,
                      residual_is_float != 0, scale};
    exchange(ranks, sum, pieces, depth);
}

// Columns of all ranks, one rank's behind the other's; `begins[q]` is where those of rank q begin, `begins[count]` where all
// end. A piece is four columns of a row, of which the last of a rank may have fewer.
struct Columns {
    static constexpr int TURNS = DEPTH, UNROLLED = 1;
    const Ranks& ranks;
    const float* values;
    float* output;
    const int* begins;
    int of_row;  // pieces

    template <typename Send>
    __device__ __forceinline__ void send(long long piece, int, const Send& send) {
        if (ranks.own == 0) return;
        const int width = begins[ranks.own + 1] - begins[ranks.own], column = static_cast<int>(piece % of_row) * 4;
        const float* row = values + piece / of_row * width;
        unsigned bits[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) bits[j] = column + j < width ? __float_as_uint(__ldcg(row + column + j)) : 0;
        send(0, make_uint4(bits[0], bits[1], bits[2], bits[3]));
    }

    template <typename Inbox>
    __device__ __forceinline__ void receive(long long piece, int, const Inbox& inbox) {
        if (ranks.own != 0) return;
        const int column = static_cast<int>(piece % of_row) * 4;
        const long long row = piece / of_row;
        for (int rank = 0; rank < ranks.count; ++rank) {
            const int width = begins[rank + 1] - begins[rank];
            const uint4 piece_of = rank == 0 ? make_uint4(0, 0, 0, 0) : inbox(rank);
            const unsigned bits[4] = {piece_of.x, piece_of.y, piece_of.z, piece_of.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (column + j < width)
                    output[row * begins[ranks.count] + begins[rank] + column + j] =
                        rank == 0 ? __ldcg(values + row * width + column + j) : __uint_as_float(bits[j]);
        }
    }
};

struct Begins {
    int of[MOST + 1];
};

// output [rows, all columns] float, rank 0's alone, of each rank's values [rows, its columns] float.
extern "C" __global__ void __launch_bounds__(THREADS)
    join_columns(const __grid_constant__ Ranks ranks, const float* values, float* output, const __grid_constant__ Begins begins, int of_row, long long pieces,
                 int depth) {
    Columns columns{ranks, values, output, begins.of, of_row};
    exchange(ranks, columns, pieces, depth);
}

// Arrays of rank 0, which all others get: array a has the pieces from ends[a - 1] to before ends[a], the last of them
// perhaps not whole.
struct Arrays {
    void* places[HOST_MOST_ARRAYS];
    long long bytes[HOST_MOST_ARRAYS], ends[HOST_MOST_ARRAYS];
};
static_assert(sizeof(Arrays) == HOST_ARRAYS_BYTES, "the host packs arrays otherwise");

struct Inputs {
    static constexpr int TURNS = DEPTH, UNROLLED = 1;
    const Ranks& ranks;
    const Arrays& arrays;

    // Where a piece of all stands, and how many bytes it has.
    __device__ __forceinline__ unsigned char* find(long long piece, int& bytes) const {
        int array = 0;
        while (piece >= arrays.ends[array]) ++array;
        const long long begin = (piece - (array ? arrays.ends[array - 1] : 0)) * 16;
        bytes = static_cast<int>(min(16LL, arrays.bytes[array] - begin));
        return static_cast<unsigned char*>(arrays.places[array]) + begin;
    }

    template <typename Send>
    __device__ __forceinline__ void send(long long piece, int, const Send& send) {
        if (ranks.own != 0) return;
        int bytes;
        const unsigned char* place = find(piece, bytes);
        uint4 value = make_uint4(0, 0, 0, 0);
        if (bytes == 16 && reinterpret_cast<size_t>(place) % 16 == 0) {
            value = __ldcg(reinterpret_cast<const uint4*>(place));
        } else {
            unsigned words[4] = {0, 0, 0, 0};
#pragma unroll
            for (int j = 0; j < 16; ++j)
                if (j < bytes) words[j / 4] |= static_cast<unsigned>(__ldcg(place + j)) << (j % 4 * 8);
            value = make_uint4(words[0], words[1], words[2], words[3]);
        }
        for (int rank = 1; rank < ranks.count; ++rank) send(rank, value);
    }

    template <typename Inbox>
    __device__ __forceinline__ void receive(long long piece, int, const Inbox& inbox) {
        if (ranks.own == 0) return;
        int bytes;
        unsigned char* place = find(piece, bytes);
        const uint4 value = inbox(0);
        if (bytes == 16 && reinterpret_cast<size_t>(place) % 16 == 0) {
            *reinterpret_cast<uint4*>(place) = value;
        } else {
            const unsigned words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
            for (int j = 0; j < 16; ++j)
                if (j < bytes) place[j] = static_cast<unsigned char>(words[j / 4] >> (j % 4 * 8));
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    share_arrays(const __grid_constant__ Ranks ranks, const __grid_constant__ Arrays arrays, long long pieces, int depth) {
    Inputs inputs{ranks, arrays};
    exchange(ranks, inputs, pieces, depth);
}

// What stands in a stream where several have come together: the next kernel has one predecessor.
extern "C" __global__ void joined() {}

}  // namespace ranks
