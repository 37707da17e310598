// What a request's rules do to its logits, before anything else reads them: masks of allowed tokens, then biases.
#include "sampling/arguments.cuh"
#include "shared/groups.cuh"
#include "shared/programmatic_launch.cuh"

// In place. A mask alone reads no logits: what it forbids is written, what it allows is left. Grid (blocks of a row, rows).
__global__ void constrain_logits(ConstrainLogitsArguments a) {
    launch_next_kernel();
    wait_for_previous_kernel();
    unsigned slot = blockIdx.y / (a.B / a.S), mask_row = __ldcg(a.mask_rows + blockIdx.y);
    bool biased = __ldcg(&a.rows[slot].biased) != 0, masked = mask_row < a.M;
    if (!biased && !masked) return;
    float* row = a.logits + (size_t)blockIdx.y * a.V;
    const float* bias = a.bias + (size_t)slot * a.V;
    const unsigned* mask = a.masks + (size_t)(masked ? mask_row : 0) * a.W;
    bool aligned = aligned_16(row), aligned_bias = aligned_16(bias);
    for (unsigned group = blockIdx.x * blockDim.x + threadIdx.x; group < group_count(a.V);
         group += gridDim.x * blockDim.x) {
        unsigned allowed = masked ? __ldcg(mask + group / 8) >> group % 8 * 4 & 15 : 15;
        if (allowed == 15 && !biased) continue;
        unsigned id = 4 * group, written = biased ? 15 : ~allowed & 15;
        float result[4];
        for (unsigned i = 0; i < 4; ++i) result[i] = minus_infinity();
        if (biased && allowed != 0) {
            Group values = load_group(row, a.V, group, aligned), added = load_group(bias, a.V, group, aligned_bias);
            for (unsigned i = 0; i < 4; ++i) {
                if (allowed >> i & 1) result[i] = without_nan(values.value[i] + added.value[i]);
            }
        }
        if (aligned && written == 15 && id + 4 <= a.V) {
            *reinterpret_cast<float4*>(row + id) = make_float4(result[0], result[1], result[2], result[3]);
        } else {
            for (unsigned i = 0; i < 4; ++i) {
                if (written >> i & 1 && id + i < a.V) row[id + i] = result[i];
            }
        }
    }
}
