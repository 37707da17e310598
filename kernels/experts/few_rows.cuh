// Products of rows with the experts that each of them chose, by the blocks of decode/linear.cuh and decode/packed_rows.cuh:
// block (x, p) has pair p of a row and an expert, and multiplies what its place x says of the expert's matrix. So a pair has
// the bits of the dense layer that the expert is, and a captured graph serves any choice.
//
// GROUPED: up to eight pairs of one expert are multiplied by the block of the first of them, and the others' blocks end: the
// expert's weights are read once for all of these rows.
#pragma once
#include "decode/few_rows.cuh"
#include "experts/addition.cuh"
#include "experts/outputs.cuh"

namespace experts {

using decode::Linear;

constexpr int MOST = 8, READS = 4;  // pairs of a group, or fewer: `most`; ids that a lane reads at once

// `linear` is the first expert's; the next one's weight begins `stride` bytes and its bias `biases` elements further. Pair p
// of `pairs` is of row p / sharing of the input, and of row p of the output; `limit`: see Clamped. counters [rows, blocks of an
// expert], zero before and after: who writes the last products of a row's columns also adds them. Null: they are left. beside:
// the previous kernel has let gates and ups start when the choice was there, see NormLinear.
struct Product {
    Linear linear;
    Addition addition;
    const int* expert_ids;
    const void* input;
    void* output;
    unsigned* counters;
    unsigned long long stride;
    int experts, biases, sharing, pairs, most;
    float limit;
    int beside;
};
static_assert(sizeof(Product) == HOST_PRODUCT_BYTES, "as the host's structure");

// `clamped` of columns n and n + 1.
template <typename T> struct Clamped {
    T* output;
    float limit;
    // Of threads beside each other, the first has the gate, the second the up.
    __device__ void operator()(int, int n, int, const float (&sum)[1], float) const {
        const float up = __shfl_down_sync(3u << (threadIdx.x % 32 & ~1u), sum[0], 1);
        if (n % 2 == 0) output[n / 2] = decode::from_float<T>(clamped(sum[0], up, limit));
    }
    __device__ void two(int, int n, int, const float2 (&sum)[1], float2) const {
        output[n / 2] = decode::from_float<T>(clamped(sum[0].x, sum[0].y, limit));
    }
};

template <typename T, int KIND> __device__ __forceinline__ auto output_of(const Product& given, int pair) {
    const size_t first = static_cast<size_t>(pair) * given.linear.rows;  // of gates, their ups are not counted
    if constexpr (KIND == GATED) return decode::GatedOutput<T>{static_cast<T*>(given.output) + first, HOST_GATE};
    else if constexpr (KIND == ALTERNATING) return Clamped<T>{static_cast<T*>(given.output) + first / 2, given.limit};
    else if constexpr (KIND == SQUARED)
        return SquaredOutput<T>{static_cast<T*>(given.output) + first, given.linear.rows};
    else return decode::FloatOutput{static_cast<float*>(given.output) + first, 1.f, given.linear.rows};
}

// The pairs that a block multiplies: its own alone, or those of one expert, in shared memory.
struct OnePair {
    static constexpr int count = 1;
    int pair;
    __device__ int operator()(int) const { return pair; }
};
struct Group {
    int count, pairs[MOST];
    __device__ int operator()(int b) const { return pairs[b]; }
};

// What becomes of sums of the pairs of a group, and which rows they are of.
template <typename T, int KIND, typename Pairs> struct GroupOutput {
    const Product& given;
    const Pairs& pairs;
    __device__ int operator()(int b) const { return pairs(b) / given.sharing; }
    __device__ float before(int, int, int) const { return 0.f; }
    __device__ float2 before_two(int, int, int) const { return make_float2(0.f, 0.f); }
    template <int SUMS_> __device__ void operator()(int b, int n, int rows, const float (&sum)[SUMS_], float) const {
        output_of<T, KIND>(given, pairs(b))(0, n, rows, sum, 0.f);
    }
    template <int SUMS_> __device__ void two(int b, int n, int rows, const float2 (&sum)[SUMS_], float2) const {
        output_of<T, KIND>(given, pairs(b)).two(0, n, rows, sum, make_float2(0.f, 0.f));
    }
};

// Finds the group that begins with the block's pair; false: another block multiplies it. All threads call it.
__device__ __forceinline__ bool find_group(const Product& given, Group& group) {
    const int own = blockIdx.y, lane = threadIdx.x;
    if (lane < 32) {  // one warp looks through all ids
        const int expert = __ldcg(given.expert_ids + own);
        int before = 0, count = 0;
        for (int first = lane; first - lane < given.pairs && count < given.most; first += 32 * READS) {
            int ids[READS];
#pragma unroll
            for (int i = 0; i < READS; ++i)
                ids[i] = first + i * 32 < given.pairs ? __ldcg(given.expert_ids + first + i * 32) : ~expert;
#pragma unroll
            for (int i = 0; i < READS; ++i) {
                const int pair = first + i * 32;
                before += __popc(__ballot_sync(decode::FULL_WARP, ids[i] == expert && pair < own));
                const unsigned others = __ballot_sync(decode::FULL_WARP, ids[i] == expert && pair >= own);
                const int place = count + __popc(others & ((1u << lane) - 1));
                if ((others >> lane & 1) && place < given.most) group.pairs[place] = pair;
                count += __popc(others);
            }
        }
        if (lane == 0) group.count = before % given.most == 0 ? min(count, given.most) : 0;
    }
    __syncthreads();
    return group.count > 0;
}

// Gates and ups wait first, unless they run beside the previous kernel, and only then let the next one begin. (LATE: even later,
// elsewhere.) So downs, whose blocks run when all of theirs have, know their experts, and begin to read them, before they wait for
// gates and ups: what these, or who let them run beside it, waited for has finished, with all that it wrote, and so has every kernel
// before it (see wait_for_previous_kernel), also the choice. ids are read past the first-level cache; nothing overwrites them before
// downs have ended, as who does waits for these.
template <int KIND, bool LATE = false> __device__ __forceinline__ void begin_behind_choice(const Product& given) {
    if (KIND != SUMS && !given.beside) wait_for_previous_kernel();
    if (!LATE) launch_next_kernel();
}
template <int KIND> __device__ __forceinline__ void wait_for_inputs() {
    if (KIND == SUMS) wait_for_previous_kernel();
}
template <int KIND> __device__ __forceinline__ void end_behind_choice(const Product& given) {
    if (KIND != SUMS && given.beside) wait_for_previous_kernel();
}

// Whether no expert is here that the block's pair chose: another rank has it.
__device__ __forceinline__ bool is_of_others(const Product& given) { return __ldcg(given.expert_ids + blockIdx.y) < 0; }

// The layer of the expert of the block's pair, for the rows of its group.
template <typename T> __device__ __forceinline__ Linear layer_of(const Product& given, int count) {
    const int expert = min(max(__ldcg(given.expert_ids + blockIdx.y), 0), given.experts - 1);
    Linear own = given.linear;
    own.batch = count;
    own.weight = static_cast<const char*>(own.weight) + expert * given.stride;
    if (own.bias != nullptr) own.bias = static_cast<const T*>(own.bias) + static_cast<size_t>(expert) * given.biases;
    return own;
}

// Adds those columns of a row whose last products this block has written, where they are to be added. UNIT: columns of each of
// the block's tiles.
template <typename T, int UNIT, typename Pairs>
__device__ __forceinline__ void add_finished(const Product& given, const Pairs& pairs) {
    if (given.counters == nullptr) return;
    const int chosen = given.addition.chosen, width = given.addition.width;
#pragma unroll 1
    for (int b = 0; b < pairs.count; ++b) {
        const int row = pairs(b) / chosen;
        if (!comes_last(given.counters + row * gridDim.x + blockIdx.x, chosen)) continue;
#pragma unroll 1
        for (int i = threadIdx.x * 4;; i += blockDim.x * 4) {
            const int column = (blockIdx.x + i / UNIT * gridDim.x) * UNIT + i % UNIT;
            if (column - i % UNIT >= width) break;
            if (column < width) add_four<T>(given.addition, row, column);
        }
    }
}

}  // namespace experts
