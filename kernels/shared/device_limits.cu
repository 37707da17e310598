// What a GPU reads, multiplies and how fast its clock is: see edgellm/device/limits.py.

#include "decode/common.cuh"

// What came of a tile's 8 rows lies where the next is copied to: nobody reads it.
template <int TILES, int DEPTH, int PIECE>
__global__ void __launch_bounds__(256) read_ring(const char* from, int units) {
    extern __shared__ __align__(16) char shared[];
    constexpr int STEPS = TILE_BYTES / 512, LANES = PIECE / 16, ROW_BYTES = TILE_BYTES / (32 / LANES);
    const int lane = threadIdx.x % 32, warps = gridDim.x * 8;
    const unsigned ring = static_cast<unsigned>(__cvta_generic_to_shared(shared)) + threadIdx.x * 16;
    const char* own = from + lane / LANES * ROW_BYTES + lane % LANES * 16;
    int unit = blockIdx.x * 8 + threadIdx.x / 32, step = 0, slot = 0;
    const auto copy = [&] {
        const bool exists = unit < units;
        const char* at = own + static_cast<long long>(exists ? unit : 0) * TILES * TILE_BYTES + step * PIECE;
#pragma unroll
        for (int c = 0; c < TILES; ++c)
            decode::copy_async_16(ring + (slot * TILES + c) * 4096, at + c * TILE_BYTES, exists);
        decode::commit_copies();
        if (++slot == DEPTH) slot = 0;
        if (++step == STEPS) step = 0, unit += warps;
    };
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) copy();
    while (unit < units) {
        decode::wait_for_copies<DEPTH - 1>();
        copy();
    }
    decode::wait_for_copies<0>();
}

extern "C" __global__ void __launch_bounds__(256) multiply(unsigned* out) {
    unsigned a[4] = {threadIdx.x, threadIdx.x ^ 1, 3, 4}, b[2] = {threadIdx.x, 7};
    float c[CHAINS][4] = {};
    for (int turn = 0; turn < TURNS; ++turn) {
#pragma unroll
        for (int i = 0; i < CHAINS; ++i)
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                "{%0,%1,%2,%3};"
                : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
    float sum = 0;
    for (int i = 0; i < CHAINS; ++i) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
    if (sum == 12345.0f) *out = 1;  // never: what is multiplied is next to zero
}

// Clocks and nanoseconds of one multiprocessor.
extern "C" __global__ void count_clocks(unsigned long long* out, unsigned nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    const long long first = clock64();
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - begin < nanoseconds);
    out[0] = clock64() - first, out[1] = now - begin;
}
