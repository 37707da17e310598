// Attention of each row to itself and to rows before it, with an online softmax (Milakov and Gimelshein 2018): a warp has a
// query, its lanes take keys 32 at a time from the first that it sees on. So a query's bits depend on the rows that it sees,
// not on which of them are kept of a run before.
#include "encoder/values.cuh"
#include "shared/reductions.cuh"

namespace encoder {

constexpr unsigned MOST = HOST_MAX_HEAD_SIZE / 32, WARPS = THREADS / 32;  // elements of a head that a lane has

// A block has neighbouring rows of a head, which see nearly the same keys. A warp keeps its own row's key and value; nobody
// reads them there in this run, nor what they are written over.
template <class Compute>
__global__ void __launch_bounds__(THREADS) past_attention(const __grid_constant__ PastAttentionArguments a) {
    __shared__ float queries[WARPS][HOST_MAX_HEAD_SIZE];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, size = a.D, blocks = (a.R + WARPS - 1) / WARPS;
    const unsigned row = blockIdx.x % blocks * WARPS + warp, head = blockIdx.x / blocks;
    const size_t plane = size_t(a.G) * a.R * size, begins = size_t(head) * a.R * size;
    const size_t kept_plane = size_t(a.G) * a.C * size, kept_begins = size_t(head) * a.C * size;
    const float low = __int_as_float(0xff800000);
    begin();
    if (row >= a.R) return;
    const unsigned before = __ldcg(a.first), last = before + row;
    for (unsigned element = lane; element < size; element += 32) {
        float query[1], key[1], value[1];
        const size_t own = begins + size_t(row) * size + element, target = kept_begins + size_t(last % a.C) * size + element;
        load<Compute, 1>(a.heads, own, query);
        load<Compute, 1>(a.heads, plane + own, key);
        load<Compute, 1>(a.heads, 2 * plane + own, value);
        queries[warp][element] = query[0] * float(a.scale) * 1.44269504f;
        store<Compute, 1>(a.kept, target, key);
        store<Compute, 1>(a.kept, kept_plane + target, value);
    }
    __syncwarp();
    float largest = low, total = 0.f, sums[MOST] = {};
    for (unsigned first = last + 1 - min(unsigned(a.past), last + 1); first <= last; first += 32) {
        const unsigned key = first + lane, count = min(32u, last + 1 - first);
        const unsigned place = key < before ? key % a.C : key - before;
        const char* keys = key < before ? a.kept : a.heads;
        const size_t found = (key < before ? kept_begins : plane + begins) + size_t(place) * size;
        float score = lane < count ? 0.f : low;
        for (unsigned element = 0; lane < count && element < size; element += 4) {
            float values[4];
            load<Compute, 4>(keys, found + element, values);
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
            const bool is_kept = first + each < before;
            const char* values = is_kept ? a.kept : a.heads;
            const size_t value = (is_kept ? kept_plane + kept_begins : 2 * plane + begins) +
                                 size_t(__shfl_sync(ALL_LANES, place, each)) * size;
#pragma unroll
            for (unsigned i = 0; i < MOST; ++i) {
                float own[1] = {0.f};
                if (lane + 32 * i < size) load<Compute, 1>(values, value + lane + 32 * i, own);
                sums[i] = fmaf(part, own[0], sums[i]);
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
