// Both ends of a plain step: what the engine reads, in one launch, and the argmax of its logits. Either overlaps with the
// engine between them.
#include "sampling/arguments.cuh"
#include "sampling/state.cuh"
#include "shared/groups.cuh"
#include "shared/programmatic_launch.cuh"
#include "shared/token_rows.cuh"

// Grid (tokens, sequences, 2): embeddings, and beside them rotary rows and masks.
template <class Compute>
__global__ void prepare_step(PrepareStepArguments a) {
    launch_next_kernel();
    size_t token = (size_t)blockIdx.y * gridDim.x + blockIdx.x;
    if (blockIdx.z == 0) {
        char* target = a.inputs.inputs_embeds + token * a.H * sizeof(Compute);
        look_up<Compute>(a.tables.embedding, a.token_ids[token], target, a.V, a.H);
        return;
    }
    long long row = (long long)a.inputs.kvcache_start_index[blockIdx.y] + blockIdx.x;
    Compute* rotary_rows = reinterpret_cast<Compute*>(a.inputs.rope_rotary_cos_sin);
    long long position = row + a.tables.position_offsets[blockIdx.y];
    write_rotary_row(a.tables.rotary, position, rotary_rows + token * a.R, a.P, a.R);
    write_mask_row(a.inputs.attention_mask + token * a.L, a.L, row);
}

// The lowest id of the largest logits of a row, by several blocks. Grid (blocks of a row, rows).
__global__ void argmax(ArgmaxArguments a, unsigned long long* best, unsigned* finished) {
    wait_for_previous_kernel();
    const float* row = a.logits + (size_t)blockIdx.y * a.V;
    bool aligned = aligned_16(row);
    unsigned long long candidate = 0;
    for (unsigned group = blockIdx.x * blockDim.x + threadIdx.x; group < group_count(a.V);
         group += gridDim.x * blockDim.x) {
        Group values = load_group(row, a.V, group, aligned);
        for (unsigned i = 0; i < 4; ++i) candidate = max(candidate, value_and_id(values.value[i], 4 * group + i));
    }
    choose_token(candidate, best, finished, a.tokens, a.state, a.V, a.E);
}
