// Heads made ready for attention, as decode steps make them: norm, rotary embedding, KV rows. A part of a warp takes a query
// of a token, or a key with its value, at a time.
#include "prefill/arguments.cuh"
#include "shared/attention.cuh"

namespace prefill {

using namespace attending;

// Neighbouring elements in float32, of values that are so or of T.
__device__ __forceinline__ float2 read_two(const float* source) { return *reinterpret_cast<const float2*>(source); }
__device__ __forceinline__ float4 read_four(const float* source) { return *reinterpret_cast<const float4*>(source); }
template <typename T> __device__ __forceinline__ float2 read_two(const T* source) {
    return unpack<T>(*reinterpret_cast<const unsigned*>(source));
}
template <typename T> __device__ __forceinline__ float4 read_four(const T* source) {
    const uint2 four = *reinterpret_cast<const uint2*>(source);
    const float2 low = unpack<T>(four.x), high = unpack<T>(four.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

// SOURCE: what `qkv` has, float or T. STEPS: of 16 elements, those of a head or up to the next power of two, from 4 on. Keys
// and values go to the caches, as integers where these are INT8. Grid: tokens of a sequence, sequences.
template <typename T, typename SOURCE, int STEPS, bool INT8>
__global__ void __launch_bounds__(256) prepare_heads(const __grid_constant__ PrepareHeadsArguments arguments) {
    using Own = Lanes<STEPS>;
    using Kept = KeptFour<T, INT8>;
    using Element = typename Kept::Element;
    constexpr int QUADS = Own::QUADS;
    launch_next_kernel();
    wait_for_previous_kernel();
    const int size = arguments.D, kv_heads = arguments.G, heads = arguments.E / size;
    const int columns = arguments.part.size > 0 ? arguments.part.size : static_cast<int>(arguments.R);
    const int rotary = arguments.rotary == nullptr ? 0 : columns, lane = threadIdx.x % Own::OF_HEAD;
    const int token = blockIdx.x, sequence = blockIdx.y, position = arguments.rows.start[sequence] + token;
    const int row = arguments.rows.window > 0 ? static_cast<int>(position % arguments.C) : position;  // of a ring
    const size_t place = static_cast<size_t>(sequence) * arguments.T + token;
    const SOURCE* const qkv = reinterpret_cast<const SOURCE*>(arguments.qkv) + place * arguments.W;
    const T* const rotation = reinterpret_cast<const T*>(arguments.rotary) + place * arguments.R + arguments.part.first;
    T* const queries = reinterpret_cast<T*>(arguments.queries) + place * arguments.E;
    const float epsilon = static_cast<float>(arguments.norms.epsilon), offset = static_cast<float>(arguments.norms.offset);
    const int items = heads + (row < static_cast<int>(arguments.C) ? kv_heads : 0), groups = blockDim.x / Own::OF_HEAD;
    for (int first = 0; first < items; first += groups) {
        const int item = first + threadIdx.x / Own::OF_HEAD, head = min(item, items - 1);
        const bool is_key = head >= heads;
        const SOURCE* const source = qkv + head * size;
        const T* const turns = rotation + (is_key ? 0 : arguments.part.further);
        const T* const norm = reinterpret_cast<const T*>(is_key ? arguments.norms.key : arguments.norms.query);
        float2 low[QUADS], high[QUADS], weight[QUADS][2];
        float4 value[QUADS];
        unsigned cosine[QUADS] = {}, sine[QUADS] = {};
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            const int quad = min(lane + 32 * q, size / 4 - 1);
            const int2 places = places_of(quad, rotary);
            low[q] = read_two(source + places.x), high[q] = read_two(source + places.y);
            if (arguments.part.neighbours && 4 * quad < rotary) take_apart(low[q], high[q], read_four(source + 4 * quad));
            value[q] = read_four(source + (is_key ? kv_heads * size : 0) + 4 * quad);
            if (norm != nullptr)
                weight[q][0] = read_norm(norm, places.x, offset), weight[q][1] = read_norm(norm, places.y, offset);
            if (4 * quad >= rotary) continue;
            cosine[q] = *reinterpret_cast<const unsigned*>(turns + 2 * quad);
            sine[q] = *reinterpret_cast<const unsigned*>(turns + 2 * quad + rotary / 2);
        }
        const bool behind = arguments.norms.query != nullptr && arguments.norms.behind;
        auto before = [&](int q, int n) { return behind ? make_float2(1.f, 1.f) : weight[q][n]; };
        auto after = [&](int q, int n) { return behind ? weight[q][n] : make_float2(1.f, 1.f); };
        if (arguments.norms.query != nullptr) norm_head<STEPS>(low, high, before, lane, size, 1.f / size, epsilon);
        if (arguments.norms.query != nullptr && arguments.norms.values) norm_value<STEPS>(value, lane, size, 1.f / size, epsilon);
        unsigned two[QUADS], other[QUADS];
        uint2 four[QUADS];
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            const float4 v = value[q];
            rotate<T>(two[q], other[q], low[q], high[q], cosine[q], sine[q], 4 * (lane + 32 * q) < rotary, after(q, 0),
                      after(q, 1));
            four[q] = make_uint2(pack<T>(v.x, v.y), pack<T>(v.z, v.w));
        }
        float scales[2] = {};
        if (INT8) find_scales<T, STEPS>(scales, two, other, four, lane, size);
        if (item >= items) continue;
        const size_t cached = (static_cast<size_t>(sequence) * kv_heads + head - heads) * arguments.C + row;  // not of queries
        if (INT8 && is_key && lane == 0)
            arguments.row_scales.key[cached] = scales[0], arguments.row_scales.value[cached] = scales[1];
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            const int quad = lane + 32 * q;
            if (4 * quad >= size) continue;
            const int2 places = places_of(quad, rotary);
            if (is_key) {
                Kept(two[q], other[q], four[q], scales)
                    .write(reinterpret_cast<Element*>(arguments.rows.k_cache) + cached * size,
                           reinterpret_cast<Element*>(arguments.rows.v_cache) + cached * size, places, 4 * quad);
            } else {
                *reinterpret_cast<unsigned*>(queries + head * size + places.x) = two[q];
                *reinterpret_cast<unsigned*>(queries + head * size + places.y) = other[q];
            }
        }
    }
}

}  // namespace prefill
