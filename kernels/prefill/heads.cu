// Heads made ready for attention: norm, rotary embedding, KV rows. A warp takes a head of a token at a time.
#include "decode/common.cuh"
#include "prefill/arguments.cuh"
#include "shared/quantized_rows.cuh"

namespace prefill {

constexpr int PAIRS = 4;  // of elements that a lane has of the largest head

// Grid: tokens of a sequence, sequences. Queries change in place; keys and values go to the caches, as integers where these
// are INT8.
template <typename T, bool INT8> __global__ void __launch_bounds__(256, 6) prepare_heads(PrepareHeadsArguments arguments) {
    const int size = arguments.D, kv_heads = arguments.G, heads = arguments.W / size - 2 * kv_heads;
    const int rotary = arguments.part.size > 0 ? arguments.part.size : static_cast<int>(arguments.R);
    const int half = arguments.rotary == nullptr ? 0 : rotary / 2, lane = threadIdx.x % 32;
    const int token = blockIdx.x, sequence = blockIdx.y, position = arguments.rows.start[sequence] + token;
    const int row = arguments.rows.window > 0 ? static_cast<int>(position % arguments.C) : position;  // of a ring
    const size_t place = static_cast<size_t>(sequence) * arguments.T + token;
    T* const qkv = reinterpret_cast<T*>(arguments.qkv) + place * arguments.W;
    const T* const rotation = reinterpret_cast<const T*>(arguments.rotary) + place * arguments.R + arguments.part.first;
    for (int head = threadIdx.x / 32; head < heads + 2 * kv_heads; head += blockDim.x / 32) {
        const bool is_query = head < heads, is_value = head >= heads + kv_heads;
        const T* const source = qkv + static_cast<size_t>(head) * size;
        T* target = qkv + static_cast<size_t>(head) * size;
        char* const cache = is_value ? arguments.rows.v_cache : arguments.rows.k_cache;
        const int kv_head = head - heads - (is_value ? kv_heads : 0);
        const size_t cached = (static_cast<size_t>(sequence) * kv_heads + kv_head) * arguments.C + row;  // not of queries
        if (!is_query) {
            if (row >= static_cast<int>(arguments.C)) continue;
            target = reinterpret_cast<T*>(cache) + cached * size;
        }
        const T* const weight = reinterpret_cast<const T*>(is_query ? arguments.norms.query : arguments.norms.key);
        const bool norms = weight != nullptr && !is_value;
        float factor = 1.f;
        if (norms) {
            float squares = 0.f;
            for (int i = lane; i < size; i += 32) {
                const float value = decode::to_float(source[i]);
                squares = fmaf(value, value, squares);
            }
            factor = rsqrtf(decode::warp_sum(squares) / size + static_cast<float>(arguments.norms.epsilon));
        }
        auto normed = [&](int i) {
            const float value = decode::to_float(source[i]);
            if (!norms) return value;
            return value * factor * (decode::to_float(weight[i]) + static_cast<float>(arguments.norms.offset));
        };
        // Elements that are rotated together are half the rotated part apart; of those behind it, neighbours.
        auto first_of = [&](int pair) { return pair < half ? pair : 2 * pair; };
        auto second_of = [&](int pair) { return pair < half ? pair + half : 2 * pair + 1; };
        auto made = [&](int pair, T& first, T& second) {
            const bool rotates = pair < half && !is_value;
            const float low = normed(first_of(pair)), high = normed(second_of(pair));
            const float cosine = rotates ? decode::to_float(rotation[pair]) : 1.f;
            const float sine = rotates ? decode::to_float(rotation[pair + half]) : 0.f;
            first = decode::from_float<T>(rotates ? fmaf(low, cosine, -high * sine) : low);
            second = decode::from_float<T>(rotates ? fmaf(high, cosine, low * sine) : high);
        };
        if (!INT8 || is_query) {
            T one, other;
            for (int pair = lane; pair < size / 2; pair += 32) {
                made(pair, one, other);
                target[first_of(pair)] = one, target[second_of(pair)] = other;
            }
            continue;
        }
        T first[PAIRS], second[PAIRS];
        unsigned bits = 0u;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            if (lane + 32 * i >= size / 2) continue;
            made(lane + 32 * i, first[i], second[i]);
            const float2 two = make_float2(decode::to_float(first[i]), decode::to_float(second[i]));
            bits = max(bits, quantized::size_bits(two));
        }
        const float scale = quantized::row_scale<32>(bits);
        if (lane == 0) (is_value ? arguments.row_scales.value : arguments.row_scales.key)[cached] = scale;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int pair = lane + 32 * i;
            if (pair >= size / 2) continue;
            const float4 two = make_float4(decode::to_float(first[i]), decode::to_float(second[i]), 0.f, 0.f);
            const unsigned integers = quantized::row_integers(two, scale);
            cache[cached * size + first_of(pair)] = integers, cache[cached * size + second_of(pair)] = integers >> 8;
        }
    }
}

}  // namespace prefill
