// Elements of rows: of float, or of a model's dtype, one by one or four at a time.
#pragma once
#include "encoder/arguments.cuh"
#include "shared/elements.cuh"
#include "shared/programmatic_launch.cuh"

namespace encoder {

constexpr unsigned THREADS = HOST_THREADS;  // of a block that has a row

// WIDTH elements, 1 or 4, as they are in memory.
template <class T, int WIDTH> struct alignas(WIDTH * sizeof(T)) Elements {
    T members[WIDTH];
};
template <int BYTES> struct Word;
template <> struct Word<2> { using Type = unsigned short; };
template <> struct Word<4> { using Type = unsigned; };
template <> struct Word<8> { using Type = uint2; };
template <> struct Word<16> { using Type = uint4; };

// What an earlier kernel wrote: from the second-level cache, as that may have run beside this one.
template <class T, int WIDTH>
__device__ __forceinline__ void load(const char* values, size_t index, float (&target)[WIDTH]) {
    using Bits = typename Word<WIDTH * sizeof(T)>::Type;
    const Bits bits = __ldcg(reinterpret_cast<const Bits*>(values + index * sizeof(T)));
    const Elements<T, WIDTH>& found = reinterpret_cast<const Elements<T, WIDTH>&>(bits);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) target[i] = to_float(found.members[i]);
}

template <class T, int WIDTH>
__device__ __forceinline__ void store(char* values, size_t index, const float (&source)[WIDTH]) {
    Elements<T, WIDTH> found;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) found.members[i] = rounded<T>(source[i]);
    *reinterpret_cast<Elements<T, WIDTH>*>(values + index * sizeof(T)) = found;
}

// Lets the next kernel begin, and returns when what earlier kernels wrote is there.
__device__ __forceinline__ void begin() {
    launch_next_kernel();
    wait_for_previous_kernel();
}

}  // namespace encoder
