// Prompts with images: their rows instead of embeddings, and rotary rows from positions in time, height and width.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/embedding_lookup.cuh"

// One block a token. The n-th image token takes row first_row + n, if there is one; `inserted` counts those that do.
extern "C" __global__ void insert_image_rows(
    const char* image_rows, const int* token_ids, char* target, int* inserted, int image_token_id, int first_row,
    unsigned rows, size_t row_bytes) {
    unsigned token = blockIdx.x;
    if (token_ids[token] != image_token_id) return;
    long long row = first_row;
    for (unsigned base = 0; base < token; base += blockDim.x) {
        unsigned other = base + threadIdx.x;
        row += __syncthreads_count(other < token && token_ids[other] == image_token_id);
    }
    if (row < 0 || row >= rows) return;
    if (threadIdx.x == 0) atomicAdd(inserted, 1);
    copy_bytes(target + token * row_bytes, image_rows + row * row_bytes, row_bytes);
}

// One block a token: column i is that of the row which the token's position along axes[i] names.
template <class Compute>
__device__ inline void rotate_token(
    const int* positions, const int* axes, const float* rotary_table, Compute* rope_rotary_cos_sin, unsigned rows,
    unsigned rotary_size) {
    size_t token = blockIdx.x;
    for (unsigned i = threadIdx.x; i < rotary_size; i += blockDim.x) {
        int axis = min(max(axes[i], 0), 2);
        size_t position = min(max(positions[axis * gridDim.x + token], 0), int(rows) - 1);
        rope_rotary_cos_sin[token * rotary_size + i] = Compute(rotary_table[position * rotary_size + i]);
    }
}

#define MROPE_ROTARY_ROWS(NAME, COMPUTE)                                                                              \
    extern "C" __global__ void NAME(                                                                                  \
        const int* positions, const int* axes, const float* rotary_table, COMPUTE* rope_rotary_cos_sin,               \
        unsigned rows, unsigned rotary_size) {                                                                        \
        rotate_token(positions, axes, rotary_table, rope_rotary_cos_sin, rows, rotary_size);                          \
    }

MROPE_ROTARY_ROWS(mrope_rotary_rows_float32, float)
MROPE_ROTARY_ROWS(mrope_rotary_rows_float16, __half)
MROPE_ROTARY_ROWS(mrope_rotary_rows_bfloat16, __nv_bfloat16)
