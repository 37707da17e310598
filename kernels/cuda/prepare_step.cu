// What a decode step does before its engine, in one launch: embedding_lookup and prepare_attention, side by side. Grid
// (tokens, sequences, 2).
#include "cuda/embedding_lookup.cuh"
#include "cuda/prepare_attention.cuh"
#include "shared/programmatic_launch.cuh"

#define PREPARE_STEP(NAME, COMPUTE)                                                                                   \
    extern "C" __global__ void NAME(                                                                                  \
        const char* table, const int* token_ids, char* inputs_embeds, unsigned vocabulary, size_t row_bytes,          \
        const int* kvcache_start_index, const int* position_offsets, const float* rotary_table,                       \
        COMPUTE* rope_rotary_cos_sin, unsigned char* attention_mask, unsigned positions, unsigned rotary_size,        \
        unsigned keys) {                                                                                              \
        launch_next_kernel();                                                                                         \
        if (blockIdx.z == 0) {                                                                                        \
            size_t token = (size_t)blockIdx.y * gridDim.x + blockIdx.x;                                               \
            look_up(table, token_ids[token], inputs_embeds + token * row_bytes, vocabulary, row_bytes);               \
        } else {                                                                                                      \
            prepare_token(                                                                                            \
                kvcache_start_index, position_offsets, rotary_table, rope_rotary_cos_sin, attention_mask, positions,  \
                rotary_size, keys);                                                                                   \
        }                                                                                                             \
    }

PREPARE_STEP(prepare_step_float32, float)
PREPARE_STEP(prepare_step_float16, __half)
PREPARE_STEP(prepare_step_bfloat16, __nv_bfloat16)
