// The router's layer and the choice by what it gives in one launch, of one row or two: blocks of one cluster leave their scores in
// the shared memory of the first, which chooses. Bits are those of norm_linear (decode/linear.cu) and of choose (choice.cu).
#include "decode/linear.cuh"
#include "experts/choice.cuh"
#include "shared/clusters.cuh"

namespace experts {

constexpr int MOST_ROWS = HOST_ROUTED_ROWS;

// Scores [MOST_ROWS, experts] at an address of the cluster.
struct ScoresOutput {
    unsigned address;
    int experts;
    float scale;
    __device__ float before(int, int, int) const { return 0.f; }
    __device__ void operator()(int b, int n, int, const float (&sum)[1], float) const {
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address + (b * experts + n) * 4), "f"(sum[0] * scale) : "memory");
    }
};

template <typename T, int EACH>
__global__ void __launch_bounds__(decode::THREADS, 2)
    route(const __grid_constant__ decode::NormLinear arguments, const __grid_constant__ Choice given, int* ids, float* weights,
          float* shared_weights) {
    using G = decode::Deep;
    __shared__ float scores[MOST_ROWS * 32 * EACH];
    __shared__ int own_ids[MOST_ROWS][32];
    __shared__ float own_scores[MOST_ROWS][32];
    arrive_at_cluster<false>();
    const auto inputs = decode::one_input<T>(arguments, G::PARTIAL);
    const unsigned address = address_in_block(decode::shared_address(scores), 0);
    wait_for_cluster();  // all have begun before any writes to another's memory
    const ScoresOutput output{address, given.experts, arguments.linear.scale};
    decode::multiply_normalized<T, 1, G::HELD, G, false>(inputs, arguments, output);
    cluster_barrier();
    const int row = threadIdx.x / 32;
    if (blockIdx.x != 0 || row >= arguments.linear.batch) return;
    const auto score_of = [&](int expert) { return scores[row * given.experts + expert]; };
    choose_row<T, EACH>(given, score_of, own_ids[row], own_scores[row], row, ids + row * given.chosen, weights + row * given.chosen,
                        shared_weights + row);
}

}  // namespace experts
