#include "cuda/prepare_attention.cuh"

#define PREPARE_ATTENTION(NAME, COMPUTE)                                                                              \
    extern "C" __global__ void NAME(                                                                                  \
        const int* kvcache_start_index, const int* position_offsets, const float* rotary_table,                       \
        COMPUTE* rope_rotary_cos_sin, unsigned char* attention_mask, unsigned positions, unsigned rotary_size,        \
        unsigned keys) {                                                                                              \
        prepare_token(                                                                                                \
            kvcache_start_index, position_offsets, rotary_table, rope_rotary_cos_sin, attention_mask, positions,      \
            rotary_size, keys);                                                                                       \
    }

PREPARE_ATTENTION(prepare_attention_float32, float)
PREPARE_ATTENTION(prepare_attention_float16, __half)
PREPARE_ATTENTION(prepare_attention_bfloat16, __nv_bfloat16)
