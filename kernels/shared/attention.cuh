// Attention's arithmetic, which decode steps and prompts share, so that a token has the same bits in both: norm and rotation
// of a head, its KV row, the weights of a tile's keys, spans of tiles and how their states are merged. Kernels differ in who
// computes what, and in where it lies meanwhile.
#pragma once
#include "decode/common.cuh"
#include "shared/quantized_rows.cuh"

namespace attending {

using decode::FULL_WARP;
using decode::LOWEST;
using decode::pack;
using decode::power_of_two;
using decode::unpack;

constexpr int KEY_TILE = 64, BLOCK = 16;  // keys of a tile, and of a step of the instruction
constexpr int BLOCKS = KEY_TILE / BLOCK;

template <bool IS, typename A, typename B> struct Choice { using Type = A; };
template <typename A, typename B> struct Choice<false, A, B> { using Type = B; };

// Of a key that is not seen: minus infinity.
__device__ __forceinline__ float no_score() { return __int_as_float(0xff800000); }

// Tiles of so many keys, and the logarithm of the tiles of a span, for at most 2^span_bits spans.
__device__ __forceinline__ int tiles_of(int length) { return (length + KEY_TILE - 1) / KEY_TILE; }
__device__ __forceinline__ int tile_bits_of(int length, int span_bits) {
    return 32 - __clz((tiles_of(length) - 1) >> span_bits);
}

// How the lanes of a warp share heads: each has two elements and the two that they are rotated with, QUADS times.
template <int STEPS> struct Lanes {
    static constexpr int OF_HEAD = STEPS <= 4 ? 16 : 32, HEADS = 32 / OF_HEAD, QUADS = (STEPS + 7) / 8;
};

// The first of two elements and of those that they are rotated with; of those behind the rotated ones, four neighbours.
__device__ __forceinline__ int2 places_of(int quad, int rotary) {
    return 4 * quad < rotary ? make_int2(2 * quad, 2 * quad + rotary / 2) : make_int2(4 * quad, 4 * quad + 2);
}

// What two elements of a normed head are multiplied by.
template <typename T> __device__ __forceinline__ float2 read_norm(const T* weight, int place, float offset) {
    const float2 two = unpack<T>(*reinterpret_cast<const unsigned*>(weight + place));
    return make_float2(two.x + offset, two.y + offset);
}

// RMS norm of a lane's elements of a head of `size`: weight(q, 0) is what `read_norm` read for those of low[q], weight(q, 1)
// for those of high[q]. Unless it `norms`, the weights alone multiply them.
template <int STEPS, int QUADS, typename Weight>
__device__ __forceinline__ void norm_head(float2 (&low)[QUADS], float2 (&high)[QUADS], const Weight& weight, int lane,
                                          int size, float inverse_size, float epsilon, bool norms = true) {
    float squares = 0.f;
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
        if (4 * (lane + 32 * q) >= size) continue;
        squares = fmaf(low[q].x, low[q].x, fmaf(low[q].y, low[q].y, squares));
        squares = fmaf(high[q].x, high[q].x, fmaf(high[q].y, high[q].y, squares));
    }
#pragma unroll
    for (int other = Lanes<STEPS>::OF_HEAD / 2; other > 0; other /= 2)
        squares += __shfl_xor_sync(FULL_WARP, squares, other);
    const float factor = norms ? rsqrtf(fmaf(squares, inverse_size, epsilon)) : 1.f;
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
        const float2 of_low = weight(q, 0), of_high = weight(q, 1);
        low[q].x = low[q].x * factor * of_low.x, low[q].y = low[q].y * factor * of_low.y;
        high[q].x = high[q].x * factor * of_high.x, high[q].y = high[q].y * factor * of_high.y;
    }
}

// The same of a value without a weight, of which a lane has four neighbours.
template <int STEPS, int QUADS>
__device__ __forceinline__ void norm_value(float4 (&value)[QUADS], int lane, int size, float inverse_size, float epsilon) {
    float2 low[QUADS], high[QUADS];
#pragma unroll
    for (int q = 0; q < QUADS; ++q)
        low[q] = make_float2(value[q].x, value[q].y), high[q] = make_float2(value[q].z, value[q].w);
    norm_head<STEPS>(low, high, [](int, int) { return make_float2(1.f, 1.f); }, lane, size, inverse_size, epsilon);
#pragma unroll
    for (int q = 0; q < QUADS; ++q) value[q] = make_float4(low[q].x, low[q].y, high[q].x, high[q].y);
}

// Of pairs that are neighbours, two stand in four elements: the first of each go to `low`, the others to `high`, as if they
// were halves of the head apart. Scores are the same sums in another order, as queries and keys are both kept so.
__device__ __forceinline__ void take_apart(float2& low, float2& high, float4 four) {
    low = make_float2(four.x, four.z), high = make_float2(four.y, four.w);
}

// Two pairs of elements, rotated where `rotates` by pairs of T, multiplied by the weights of a norm that stands behind, and
// rounded to T.
template <typename T>
__device__ __forceinline__ void rotate(unsigned& two, unsigned& other, float2 x, float2 y, unsigned cosine, unsigned sine,
                                       bool rotates, float2 of_x = make_float2(1.f, 1.f),
                                       float2 of_y = make_float2(1.f, 1.f)) {
    const float2 c = rotates ? unpack<T>(cosine) : make_float2(1.f, 1.f);
    const float2 s = rotates ? unpack<T>(sine) : make_float2(0.f, 0.f);
    two = pack<T>(fmaf(x.x, c.x, -y.x * s.x) * of_x.x, fmaf(x.y, c.y, -y.y * s.y) * of_x.y);
    other = pack<T>(fmaf(y.x, c.x, x.x * s.x) * of_y.x, fmaf(y.y, c.y, x.y * s.y) * of_y.y);
}

// The scales of a key, whose elements of a lane are `two` and `other`, and of its value, `four`, as rows of int8.
template <typename T, int STEPS, int QUADS>
__device__ __forceinline__ void find_scales(float (&scales)[2], const unsigned (&two)[QUADS], const unsigned (&other)[QUADS],
                                            const uint2 (&four)[QUADS], int lane, int size) {
    using quantized::size_bits;
    unsigned bits[2] = {};
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
        if (4 * (lane + 32 * q) >= size) continue;
        bits[0] = max(bits[0], max(size_bits(unpack<T>(two[q])), size_bits(unpack<T>(other[q]))));
        bits[1] = max(bits[1], max(size_bits(unpack<T>(four[q].x)), size_bits(unpack<T>(four[q].y))));
    }
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) scales[kind] = quantized::row_scale<Lanes<STEPS>::OF_HEAD>(bits[kind]);
}

// A lane's elements of a new key and its value, as rows of caches hold them: two of the key, two others, four of the value.
template <typename T, bool INT8> struct KeptFour {
    using Element = typename Choice<INT8, signed char, T>::Type;
    using Two = typename Choice<INT8, unsigned short, unsigned>::Type;
    using Four = typename Choice<INT8, unsigned, uint2>::Type;
    Two two, other;
    Four four;

    __device__ __forceinline__ KeptFour(unsigned own_two, unsigned own_other, uint2 own_four, const float (&scales)[2]) {
        if constexpr (INT8) {
            auto integers = [](unsigned low, unsigned high, float scale) {
                const float2 x = unpack<T>(low), y = unpack<T>(high);
                return quantized::row_integers(make_float4(x.x, x.y, y.x, y.y), scale);
            };
            const unsigned both = integers(own_two, own_other, scales[0]);
            two = both, other = both >> 16, four = integers(own_four.x, own_four.y, scales[1]);
        } else {
            two = own_two, other = own_other, four = reinterpret_cast<const Four&>(own_four);
        }
    }

    __device__ __forceinline__ void write(Element* key, Element* value, int2 place, int column) const {
        *reinterpret_cast<Two*>(key + place.x) = two;
        *reinterpret_cast<Two*>(key + place.y) = other;
        *reinterpret_cast<Four*>(value + column) = four;
    }
    __device__ __forceinline__ void write_key(Element* of_two, Element* of_other) const {
        *reinterpret_cast<Two*>(of_two) = two, *reinterpret_cast<Two*>(of_other) = other;
    }
    __device__ __forceinline__ void write_value(Element* value) const { *reinterpret_cast<Four*>(value) = four; }
};

// Products of a query and four keys, as scores below a cap: cap tanh(product inverse_cap), where inverse_cap is the scale of
// scores over the cap.
__device__ __forceinline__ void cap_scores(float (&score)[4], float cap, float inverse_cap) {
#pragma unroll
    for (int i = 0; i < 4; ++i) score[i] = cap * tanhf(score[i] * inverse_cap);
}

// Hides a lane's scores of a row, number `half` of its two: of eights of keys, the first key at `begin`, those up to `before`,
// where a window is, and those behind `last`.
template <int EIGHTS>
__device__ __forceinline__ void hide_scores(float (&score)[EIGHTS][4], int half, int begin, int before, int last) {
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int key = begin + 8 * n + 2 * (threadIdx.x % 4) + i;
            if (key > last || key <= before) score[n][2 * half + i] = no_score();
        }
}

// The largest score that a lane's row number HALF has in a tile.
template <int HALF> __device__ __forceinline__ float largest_score(const float (&score)[2 * BLOCKS][4]) {
    float largest = fmaxf(score[0][2 * HALF], score[0][2 * HALF + 1]);
#pragma unroll
    for (int n = 1; n < 2 * BLOCKS; ++n) largest = fmaxf(largest, fmaxf(score[n][2 * HALF], score[n][2 * HALF + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
}

// Makes weights of two scores of a lane's row number HALF, of eight keys number `n`, as the next product takes them: powers of
// two, of scores times `factor` less the `maximum`. Where values have scales, these come in, and the weights before are added
// to `total`; eights come in their order.
template <int HALF, bool INT8, typename T>
__device__ __forceinline__ void weigh_two(unsigned (&weight)[BLOCKS][4], float& total, const float (&score)[2 * BLOCKS][4],
                                          int n, float factor, float maximum, float2 scale, T) {
    const float offset = INT8 ? quantized::WEIGHT_BITS - maximum : -maximum;
    float low = power_of_two(fmaf(score[n][2 * HALF], factor, offset));
    float high = power_of_two(fmaf(score[n][2 * HALF + 1], factor, offset));
    if constexpr (INT8) total += low + high, low *= scale.x, high *= scale.y;
    weight[n / 2][HALF + 2 * (n % 2)] = pack<T>(low, high);
}

// A row's sum of what its four lanes have.
__device__ __forceinline__ float sum_of_row(float part) {
    part += __shfl_xor_sync(FULL_WARP, part, 1);
    return part + __shfl_xor_sync(FULL_WARP, part, 2);
}

// A matrix of ones, by which weights are added as they are multiplied: rounded, and in the instruction's order.
template <typename T> struct Ones;
template <> struct Ones<__half> { static constexpr unsigned PAIR = 0x3c003c00u; };
template <> struct Ones<__nv_bfloat16> { static constexpr unsigned PAIR = 0x3f803f80u; };

// Tensor cores leave a lane sums of two columns of each eight; of int8, of four neighbours of each 16, since the first eight
// have the even columns. Number n of the lane's pairs of neighbours, of its row `half`: their first column, and its sums.
template <bool INT8> __device__ __forceinline__ int column_of(int n) {
    return INT8 ? 16 * (n / 2) + 4 * (threadIdx.x % 4) + 2 * (n % 2) : 8 * n + 2 * (threadIdx.x % 4);
}
template <int WHICH, bool INT8, typename Sums> __device__ __forceinline__ auto& neighbour(Sums& sum, int n, int half) {
    return INT8 ? sum[n / 2 * 2 + WHICH][2 * half + n % 2] : sum[n][2 * half + WHICH];
}

// Raises the largest score; what is multiplied by its powers before and in the part that is added.
__device__ __forceinline__ float2 next_maximum(float& maximum, float of_part) {
    const float before = maximum;
    maximum = fmaxf(before, of_part);
    return make_float2(power_of_two(before - maximum), power_of_two(of_part - maximum));
}

__device__ __forceinline__ void add_part(float& whole, float part, float2 factors) {
    whole = fmaf(part, factors.y, __fmul_rn(whole, factors.x));
}

// What a row's weighted values are multiplied by in the end: the inverse of the sum of its weights. A sink is a score beside
// those of keys, which has no value; with rows of int8 its weight, too, is 2^WEIGHT_BITS times as large.
template <bool INT8> __device__ __forceinline__ float inverse_with_sink(float maximum, float total, float sink) {
    constexpr float TIMES = INT8 ? 1 << quantized::WEIGHT_BITS : 1;
    const float2 factors = next_maximum(maximum, sink * 1.4426950408889634f);
    return factors.x / fmaf(total, factors.x, TIMES * factors.y);
}

}  // namespace attending
