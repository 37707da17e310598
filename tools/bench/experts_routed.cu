// What `experts_variants.py` tries in place of a mixture's router and gates and ups at one row: the second kernel chooses, each of
// its blocks for itself, with the bits of experts/router.cu. So nobody waits for a last block's counter, and no ids are read.
#include "experts/router.cu"

#include "experts/packed_rows.cu"
#include "shared/clusters.cuh"

namespace decode {
namespace packed {

struct RouterStaging {  // as stage_normalized asks: what was copied last may still be under way
    static constexpr int HALVES = 1, STAGES = 2;
};

// TILES of 8 experts are scored by each of the eight blocks of a cluster, which lie along y, before the input is there to the
// last product; of 0, another kernel has scored, and left the normalized row. Block (0, 0) also writes down what is chosen.
template <int TILES, int EACH, typename T, typename G>
__device__ __forceinline__ void route_and_multiply(const NormLinear& arguments, const experts::Choice& given, const experts::Product& product) {
    extern __shared__ __align__(16) char shared[];
    const Linear& router = arguments.linear;
    const int steps = router.steps, columns = router.columns, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int turn = decode::THREADS * 16;
    // The router's weights lie where those of gates and ups come when they have been multiplied.
    char* behind = shared + max(G::BEHIND, TILES * steps * turn);
    float* norm_sums = reinterpret_cast<float*>(behind);
    T* norm_weights = reinterpret_cast<T*>(behind + G::NORM_SUMS);
    char* activations = reinterpret_cast<char*>(norm_weights + SLICES * steps * 32);
    float *partial = reinterpret_cast<float*>(activations + SLICES * steps * 64), *scores = partial + TILES * SLICES * 8;
    float* shares = scores + given.experts;
    int* ids = reinterpret_cast<int*>(shares + 32);
    if constexpr (TILES > 0) {
        arrive_at_cluster();
        const NormInputs<T, 1> inputs = one_input<T>(arguments);
        inputs.copy_weights(norm_weights, columns);
        commit_copies();
        const unsigned ring = shared_address(shared) + threadIdx.x * 16;
        const int column = own_column(steps);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const size_t expert = (blockIdx.y * TILES + tile) * 8 + own_row();
            const T* row = static_cast<const T*>(router.weight) + expert * columns + column;
#pragma unroll 1
            for (int step = 0; step < steps; ++step)
                copy_async_16(ring + (tile * steps + step) * turn, row + step * 32, column + step * 32 < columns);
        }
        commit_copies();
        wait_for_previous_kernel();
        stage_normalized<T, 1, 1, RouterStaging>(inputs, norm_weights, norm_sums, activations, 1, columns, steps);
        wait_for_copies<0>();
        const Staged own = staged_for_lane(activations, 1, steps);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            float sum[4] = {};
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
                unsigned x[2] = {}, y[2] = {}, z[2] = {}, w[2] = {};
                if (own_row() == 0) {
                    const uint4 a = read_shared_16(own.place(0, step));
                    x[0] = a.x, y[0] = a.y, z[0] = a.z, w[0] = a.w;
                }
                const uint4 b = read_shared_16(ring + (tile * steps + step) * turn);
                multiply_add(sum, x, y, b.x, b.y, T());
                multiply_add(sum, z, w, b.z, b.w, T());
            }
            if (own_row() == 0)
                *reinterpret_cast<float2*>(partial + (tile * SLICES + warp) * 8 + own_quad() * 2) = make_float2(sum[0], sum[1]);
        }
        __syncthreads();
        wait_for_cluster();  // all of its blocks have begun
        constexpr int OWN = TILES * 8;
        if (threadIdx.x < 8 * OWN) {  // every thread gives one score to one block
            const int expert = threadIdx.x % OWN;
            float total = 0.f;
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                float group = 0.f;
#pragma unroll
                for (int i = 0; i < SLICES_OF_A_GROUP; ++i)
                    group += partial[(expert / 8 * SLICES + g * SLICES_OF_A_GROUP + i) * 8 + expert % 8];
                total += group;
            }
            *pointer_in_block(scores + blockIdx.y * OWN + expert, threadIdx.x / OWN) = total * router.scale;
        }
        cluster_barrier();
    } else {
        wait_for_previous_kernel();
        float own = 0.f;
        if (threadIdx.x < given.experts) own = __ldcg(given.scores + threadIdx.x);
        stage_as_is(static_cast<const T*>(product.input), SelectedRows{nullptr, 1}, activations, 1, columns, steps);
        if (threadIdx.x < given.experts) scores[threadIdx.x] = own;
        __syncthreads();
    }
    if (warp == 0) {
        experts::Choice local = given;
        local.scores = scores, local.ids = ids, local.weights = shares;
        experts::choose_of_row<T, EACH>(local, 0);
        __syncwarp();
        if (blockIdx.x + blockIdx.y == 0 && lane < given.chosen) {
            given.ids[lane] = ids[lane], given.weights[lane] = shares[lane];
            __threadfence();
        }
        __syncwarp();
        launch_next_kernel();
    }
    __syncthreads();
    using Output = experts::GroupOutput<T, experts::GATED, experts::OnePair>;
    const experts::OnePair pairs{static_cast<int>(blockIdx.y)};
    const Output output{product, pairs};
    Linear linear = product.linear;
    linear.batch = 1;
    linear.weight = static_cast<const char*>(linear.weight) + min(max(ids[blockIdx.y], 0), product.experts - 1) * product.stride;
    Source<G> stream(linear, shared);
    stream.start();
    OwnPair<T, G, Output> pair(linear, output);
    pair.read(0);
    multiply_staged(linear, stream, pair, activations, reinterpret_cast<float*>(shared + G::AREAS_BEGIN));
}

template <int TILES, int EACH, typename T, bool ONE, bool WHOLE, bool BRIEF, int SHARING, int WEIGHT_TILES, int DEPTH, bool LATE,
          int PASS, int EVERY, int SCALES, int MODE, int BLOCKS>
__global__ void __launch_bounds__(decode::THREADS, BLOCKS)
    routed_gated(const __grid_constant__ NormLinear arguments, const __grid_constant__ experts::Choice given,
                 const __grid_constant__ experts::Product product) {
    route_and_multiply<TILES, EACH, T, ROWS_GEOMETRY(true)>(arguments, given, product);
}

}  // namespace packed
}  // namespace decode
