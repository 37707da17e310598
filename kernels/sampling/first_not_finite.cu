// Where a tensor of any length, from any element of memory on, is first infinite or NaN.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "sampling/arguments.cuh"

// Whether any of the values in a word has every bit of its exponent set. EXPONENT has those of one value; one of 16 bits
// stands in each half of the word.
template <unsigned EXPONENT>
__device__ inline bool has_not_finite(unsigned word) {
    constexpr unsigned UPPER = EXPONENT << 16;  // 0 for values of 32 bits, whose exponent is in the upper half already
    constexpr bool PAIR = EXPONENT < 0x10000u;
    return (word & EXPONENT) == EXPONENT || (PAIR && (word & UPPER) == UPPER);
}

template <class Compute> struct Format;
template <> struct Format<float> { using Bits = unsigned; static constexpr unsigned EXPONENT = 0x7f800000u; };
template <> struct Format<__half> { using Bits = unsigned short; static constexpr unsigned EXPONENT = 0x7c00u; };
template <> struct Format<__nv_bfloat16> { using Bits = unsigned short; static constexpr unsigned EXPONENT = 0x7f80u; };

// Each thread looks at groups of 16 bytes whose addresses allow one load, in ascending order, so that the first that it
// finds is its lowest; the values before the first group and behind the last are the first threads' besides. `index`
// is all ones, which is more than any index, or what an earlier thread found.
template <class Compute>
__global__ void first_not_finite(FirstNotFiniteArguments a) {
    using Bits = typename Format<Compute>::Bits;
    constexpr unsigned EXPONENT = Format<Compute>::EXPONENT;
    const Bits* values = reinterpret_cast<const Bits*>(a.values);
    size_t count = a.N;
    constexpr unsigned PER_GROUP = 16 / sizeof(Bits);
    constexpr size_t NONE = ~size_t(0);
    size_t head = min(count, size_t((16 - (size_t(values) & 15)) % 16 / sizeof(Bits)));
    size_t groups = (count - head) / PER_GROUP, tail = head + groups * PER_GROUP;
    size_t thread = size_t(blockIdx.x) * blockDim.x + threadIdx.x, threads = size_t(gridDim.x) * blockDim.x;
    size_t found = NONE;
    auto look_at = [&](size_t place) {
        if ((values[place] & EXPONENT) == EXPONENT) found = min(found, place);
    };
    if (thread < head) look_at(thread);
    const uint4* aligned = reinterpret_cast<const uint4*>(values + head);
    for (size_t group = thread; group < groups && found == NONE; group += threads) {
        uint4 words = __ldcs(aligned + group);  // read once
        if (has_not_finite<EXPONENT>(words.x) || has_not_finite<EXPONENT>(words.y) ||
            has_not_finite<EXPONENT>(words.z) || has_not_finite<EXPONENT>(words.w)) {
            for (unsigned i = 0; i < PER_GROUP; ++i) look_at(head + group * PER_GROUP + i);
        }
    }
    if (thread < count - tail) look_at(tail + thread);
    if (found != NONE) atomicMin(reinterpret_cast<unsigned long long*>(a.index), (unsigned long long)found);
}
