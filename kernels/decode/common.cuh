// What the kernels of linear layers and attention share, those of long prompts too: conversions, loads with cache hints,
// sums over a warp, matrices for tensor cores. Names in capitals that begin with HOST_ are what the launchers take a
// constant to be.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "shared/programmatic_launch.cuh"

namespace decode {

constexpr unsigned FULL_WARP = 0xffffffffu;
// A linear layer's sums over K: of slices of K, each from zero; then of groups of them, in order.
constexpr int SLICES = 16, SLICES_OF_A_GROUP = 4, GROUPS = SLICES / SLICES_OF_A_GROUP;
static_assert(SLICES == HOST_SLICES, "the host pads rows to whole slices");
constexpr float LOWEST = -1e38f;  // below every score; its difference to itself is 0, unlike infinity's

__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T> __device__ __forceinline__ T from_float(float value);
template <> __device__ __forceinline__ __half from_float<__half>(float value) { return __float2half_rn(value); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

// Where a kernel also leaves rows of T, `stride` apart: normalized or, where `raw`, as they were. Null: nowhere.
struct Kept {
    void* target;
    int stride, raw;
};

// LoRA adapters of a linear layer, see adapters.cuh: a [places * P, K], b [places * P, N] and scales [sequences, places] of T,
// P = modules * rank for the layers that are fused in this one, whose columns, but the last's, end at `ends`; each sequence has
// `tokens` rows. low [places, batch, P / 2] words; the next launch's `low` is to be cleared. Of a kernel of few rows, the units that A's rows
// are, and the first blocks, which multiply them.
struct Adapters {
    const void *a, *b, *scales;
    unsigned *low, *next_low;
    int places, modules, rank, tokens, next_words, low_units, low_blocks, ends[2];
};

// A linear layer: weight [rows, columns] and bias (null: none) of T, what its sums are multiplied by, rows of activations,
// and the steps of 32 columns in a slice. Of gates and ups, `rows` are the outputs: half of the weight's. Outputs may be the
// `rows` from `first` on of a layer that has `width`, where others are a launch of their own: outputs begin there.
struct Linear {
    const void *weight, *bias;
    float scale;
    int batch, rows, columns, steps, first, width;
    Adapters adapters;
};
static_assert(sizeof(Kept) == HOST_KEPT_BYTES && sizeof(Linear) == HOST_LINEAR_BYTES, "as the host's structures");

template <typename T> __device__ __forceinline__ float2 unpack(unsigned pair);
template <> __device__ __forceinline__ float2 unpack<__half>(unsigned pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
template <> __device__ __forceinline__ float2 unpack<__nv_bfloat16>(unsigned pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

template <typename T> __device__ __forceinline__ unsigned pack(float low, float high);
template <> __device__ __forceinline__ unsigned pack<__half>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}
template <> __device__ __forceinline__ unsigned pack<__nv_bfloat16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

template <typename T> __device__ __forceinline__ void unpack8(uint4 packed, float (&values)[8]) {
    const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<T>(words[i]);
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
    }
}

template <typename T> __device__ __forceinline__ uint4 pack8(const float (&values)[8]) {
    return make_uint4(pack<T>(values[0], values[1]), pack<T>(values[2], values[3]), pack<T>(values[4], values[5]),
                      pack<T>(values[6], values[7]));
}

// Activations come from the previous kernel, which may still run when this one starts: always from the second-level
// cache, never through a first-level line that an earlier kernel left behind.
__device__ __forceinline__ void load8_float(const float* pointer, float (&values)[8]) {
    const float4 low = __ldcg(reinterpret_cast<const float4*>(pointer));
    const float4 high = __ldcg(reinterpret_cast<const float4*>(pointer) + 1);
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(FULL_WARP, value, offset);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, offset));
    return value;
}

// 2^exponent; 0 for what lies below normal numbers.
__device__ __forceinline__ float power_of_two(float exponent) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
    return result;
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// A value that is computed here, once, rather than anew wherever it is used.
template <typename Value> __device__ __forceinline__ Value in_register(Value value) {
    asm volatile("" : "+r"(value));
    return value;
}

// 16 bytes to shared memory, asynchronously; zeros, and nothing is read, where they do not exist.
__device__ __forceinline__ void copy_async_16(unsigned shared, const void* global, bool exists) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "r"(exists ? 16u : 0u)
                 : "memory");
}

// The same of 4 bytes.
__device__ __forceinline__ void copy_async_4(unsigned shared, const void* global, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(exists ? 4u : 0u)
                 : "memory");
}

// Ends a group of the thread's copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns when at most `PENDING` of the thread's groups, the youngest ones, are under way.
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A barrier in shared memory that counts bytes which the tensor memory accelerator brings: begun by one thread, one arrival a
// turn, which says how many; and waited for, in turns of parity 0, 1, 0 and so on.
__device__ __forceinline__ void start_barrier(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
template <int BYTES> __device__ __forceinline__ void expect_bytes(unsigned barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void wait_for_barrier(unsigned barrier, int parity) {
    asm volatile(
        "{\n.reg .pred ready;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ready, [%0], %1;\n@!ready bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// Bytes in sixteens to shared memory, which the barrier then counts; by one thread.
template <int BYTES> __device__ __forceinline__ void copy_bytes(unsigned shared, const void* global, unsigned barrier) {
    static_assert(BYTES % 16 == 0, "as the accelerator copies");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "n"(BYTES), "r"(barrier)
        : "memory");
}
// What has been begun is seen by the accelerator.
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ uint4 read_shared_16(unsigned shared) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(shared)
                 : "memory");
    return value;
}

// Four 8 x 8 matrices of 16-bit elements, one to a register; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(unsigned (&fragment)[4], unsigned shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(shared)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_transposed_matrices(unsigned (&fragment)[4], unsigned shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(shared)
                 : "memory");
}

// sum [8 or 16 rows, 8 weight rows] += a [.., 16] times the transpose of b [8, 16]; of 8 rows, the lower half of the 16
// that the instruction multiplies is zero. A lane holds sums of row lane / 4, weight rows 2 (lane % 4) and + 1, then of
// the row 8 further. `begins`: the sum is zero, whatever it holds.
#define DECODE_MULTIPLY_ADD(T, NAME)                                                                                   \
    __device__ __forceinline__ void multiply_add(float (&sum)[2], const unsigned (&a0)[1], const unsigned (&a2)[1],    \
                                                 unsigned b0, unsigned b1, T) {                                        \
        float lower[2];                                                                                                \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 "                                    \
                     "{%0,%1,%2,%3}, {%4,%5,%6,%5}, {%7,%8}, {%9,%10,%11,%11};"                                        \
                     : "=f"(sum[0]), "=f"(sum[1]), "=f"(lower[0]), "=f"(lower[1])                                      \
                     : "r"(a0[0]), "r"(0u), "r"(a2[0]), "r"(b0), "r"(b1), "f"(sum[0]), "f"(sum[1]), "f"(0.f));         \
    }                                                                                                                  \
    __device__ __forceinline__ void multiply_add(float (&sum)[4], const unsigned (&a0)[2], const unsigned (&a2)[2],    \
                                                 unsigned b0, unsigned b1, T) {                                        \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 "                                    \
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                           \
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                          \
                     : "r"(a0[0]), "r"(a0[1]), "r"(a2[0]), "r"(a2[1]), "r"(b0), "r"(b1));                              \
    }                                                                                                                  \
    __device__ __forceinline__ void multiply_add(float (&sum)[4], const unsigned (&a0)[2], const unsigned (&a2)[2],    \
                                                 unsigned b0, unsigned b1, bool begins, T) {                           \
        asm volatile("{\n.reg .pred begins;\nsetp.ne.u32 begins, %10, 0;\n"                                            \
                     "@begins mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 "                            \
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%11,%11,%11,%11};\n"                                     \
                     "@!begins mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 "                           \
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n}"                                        \
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                          \
                     : "r"(a0[0]), "r"(a0[1]), "r"(a2[0]), "r"(a2[1]), "r"(b0), "r"(b1), "r"(begins ? 1u : 0u),        \
                       "f"(0.f));                                                                                      \
    }
DECODE_MULTIPLY_ADD(__half, "f16")
DECODE_MULTIPLY_ADD(__nv_bfloat16, "bf16")
#undef DECODE_MULTIPLY_ADD

// sum [16, 8] += a [16, 16], as `load_matrices` loads it, times the transpose of b [8, 16].
template <typename T>
__device__ __forceinline__ void multiply(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned lower[2] = {a[0], a[1]}, upper[2] = {a[2], a[3]};
    multiply_add(sum, lower, upper, b0, b1, T());
}

// The same of the products alone: nothing is added to them.
#define DECODE_MULTIPLY(T, NAME)                                                                                       \
    __device__ __forceinline__ void multiply_alone(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,  \
                                                   T) {                                                                \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 "                                    \
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"                                       \
                     : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));                        \
    }
DECODE_MULTIPLY(__half, "f16")
DECODE_MULTIPLY(__nv_bfloat16, "bf16")
#undef DECODE_MULTIPLY

// Waits for the THREADS threads of a team, 0 to 3, which lie one behind the other in a block. Barriers have constant
// numbers: tools that look for races do not follow others.
template <int THREADS> __device__ __forceinline__ void wait_for_team(int team) {
    if (team == 0) asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
    else if (team == 1) asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory");
    else if (team == 2) asm volatile("bar.sync 3, %0;" ::"n"(THREADS) : "memory");
    else asm volatile("bar.sync 4, %0;" ::"n"(THREADS) : "memory");
}

}  // namespace decode
