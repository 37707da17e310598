// Attention of each row to itself and to rows before it, with an online softmax (Milakov and Gimelshein 2018): a warp has a
// query, its lanes take keys 32 at a time from the first that it sees on. So a query's bits depend on the rows that it sees.
#include "encoder/values.cuh"
#include "shared/reductions.cuh"

namespace encoder {

constexpr unsigned MOST = HOST_MAX_HEAD_SIZE / 32, WARPS = THREADS / 32;  // elements of a head that a lane has

// A block has neighbouring rows of a head, which see nearly the same keys.
template <class Compute>
__global__ void __launch_bounds__(THREADS) past_attention(const __grid_constant__ PastAttentionArguments a) {
    __shared__ float queries[WARPS][HOST_MAX_HEAD_SIZE];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, size = a.D, blocks = (a.R + WARPS - 1) / WARPS;
    const unsigned row = blockIdx.x % blocks * WARPS + warp, head = blockIdx.x / blocks;
    const size_t plane = size_t(a.G) * a.R * size, begins = size_t(head) * a.R * size;
    const float low = __int_as_float(0xff800000);
    begin();
    if (row >= a.R) return;
    for (unsigned element = lane; element < size; element += 32) {
        float query[1];
        load<Compute, 1>(a.heads, begins + size_t(row) * size + element, query);
        queries[warp][element] = query[0] * float(a.scale) * 1.44269504f;
    }
    __syncwarp();
    float largest = low, total = 0.f, sums[MOST] = {};
    for (unsigned first = row + 1 - min(unsigned(a.past), row + 1); first <= row; first += 32) {
        const unsigned key = first + lane, count = min(32u, row + 1 - first);
        float score = lane < count ? 0.f : low;
        for (unsigned element = 0; lane < count && element < size; element += 4) {
            float values[4];
            load<Compute, 4>(a.heads, plane + begins + size_t(key) * size + element, values);
#pragma unroll
            for (unsigned i = 0; i < 4; ++i) score = fmaf(queries[warp][element + i], values[i], score);
        }
        const float most = fmaxf(largest, warp_maximum(score)), correction = exp2f(largest - most);
        const float weight = exp2f(score - most);
        total = fmaf(total, correction, warp_sum(weight));
#pragma unroll
        for (unsigned i = 0; i < MOST; ++i) sums[i] *= correction;
        for (unsigned each = 0; each < count; ++each) {
            const float part = __shfl_sync(ALL_LANES, weight, each);
            const size_t value = 2 * plane + begins + size_t(first + each) * size;
#pragma unroll
            for (unsigned i = 0; i < MOST; ++i) {
                float found[1] = {0.f};
                if (lane + 32 * i < size) load<Compute, 1>(a.heads, value + lane + 32 * i, found);
                sums[i] = fmaf(part, found[0], sums[i]);
            }
        }
        largest = most;
    }
#pragma unroll
    for (unsigned i = 0; i < MOST; ++i) {
        const float result[1] = {sums[i] / total};
        if (lane + 32 * i < size) store<Compute, 1>(a.context, size_t(row) * a.E + head * size + lane + 32 * i, result);
    }
}

}  // namespace encoder
