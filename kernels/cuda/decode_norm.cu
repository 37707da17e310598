// RMS norm of many rows, once for all blocks of the linear layer that follows; the same bits as where the layer norms its
// own activations.
#include "cuda/decode_activations.cuh"

namespace decode {

// What stage_normalized asks of a geometry: one row, and no ring of weights.
struct OneRow {
    static constexpr int HALVES = 1, STAGES = 1;
};

// output [rows, WARPS * steps * 32]: zeros behind the columns. Grid (1, rows). next_early: see norm_linear.
template <typename T>
__device__ __forceinline__ void norm(NormInputs<T, 1> inputs, T* output, int columns, int steps, bool next_early) {
    extern __shared__ __align__(16) char shared[];
    float* sums = reinterpret_cast<float*>(shared);                 // [8, SUM_STRIDE]
    T* norm_weights = reinterpret_cast<T*>(sums + 8 * SUM_STRIDE);  // [columns]
    const size_t row = blockIdx.y;
    if (next_early) launch_next_kernel();
    inputs.copy_weights(norm_weights, columns);
    commit_copies();
    wait_for_previous_kernel();
    if (!next_early) launch_next_kernel();
    inputs.values[0] = static_cast<const char*>(inputs.values[0]) + row * columns * (inputs.is_float[0] ? 4 : sizeof(T));
    if (inputs.kept != nullptr) inputs.kept += row * inputs.kept_stride;
    char* own = reinterpret_cast<char*>(output + row * WARPS * steps * 32);
    stage_normalized<T, 1, 1, OneRow>(inputs, norm_weights, sums, own, 1, columns, steps);
}

}  // namespace decode

#define DECODE_NORM_KERNEL(NAME, T)                                                                                    \
    extern "C" __global__ void __launch_bounds__(decode::THREADS) decode_norm_##NAME(                                  \
        const void* input, int input_float, const T* norm_weight, float epsilon, T* output, int columns, int steps,    \
        int next_early, T* kept, int kept_stride, int keeps_raw) {                                                     \
        decode::norm<T>(                                                                                               \
            decode::NormInputs<T, 1>{                                                                                  \
                {input}, {input_float != 0}, {norm_weight}, epsilon, columns, kept, kept_stride, keeps_raw != 0},      \
            output, columns, steps, next_early != 0);                                                                  \
    }

DECODE_NORM_KERNEL(float16, __half)
DECODE_NORM_KERNEL(bfloat16, __nv_bfloat16)
