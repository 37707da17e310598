// Query, key and value heads, each by itself, as attention reads them, queries and keys turned.
#include "encoder/values.cuh"

namespace encoder {

// A block has a row; a thread takes four elements of a head at a time, and those that they are paired with.
template <class In, class Compute>
__global__ void __launch_bounds__(THREADS) prepare_heads(const __grid_constant__ PrepareHeadsArguments a) {
    const unsigned half = a.D / 2, parts = half / 4;
    const char* rotary = reinterpret_cast<const char*>(a.rotary);
    begin();
    for (unsigned i = threadIdx.x; i < 3 * a.G * parts; i += THREADS) {
        const unsigned head = i / parts, element = i % parts * 4;
        const size_t source = size_t(blockIdx.x) * a.W + head * a.D + element;
        float low[4], high[4];
        load<In, 4>(a.qkv, source, low);
        load<In, 4>(a.qkv, source + half, high);
        if (rotary != nullptr && head < 2 * a.G) {
            float cosine[4], sine[4];
            load<float, 4>(rotary, size_t(blockIdx.x) * a.D + element, cosine);
            load<float, 4>(rotary, size_t(blockIdx.x) * a.D + half + element, sine);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float x = low[j], y = high[j];
                low[j] = x * cosine[j] - y * sine[j], high[j] = y * cosine[j] + x * sine[j];
            }
        }
        const size_t target = (size_t(head) * a.R + blockIdx.x) * a.D + element;
        store<Compute, 4>(a.heads, target, low);
        store<Compute, 4>(a.heads, target + half, high);
    }
}

}  // namespace encoder
