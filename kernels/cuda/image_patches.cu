// Resampling of images in two passes of whole numbers, the second of which also makes the rows of a vision encoder. See
// edgellm.kernels.image_interface.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// WEIGHT_BITS of image_interface.py.
#define IMAGE_WEIGHT_BITS 22

// One channel of the pixel at (row, column) of an image of `rows` x `columns`, resampled along `axis`.
__device__ inline int resampled_value(
    const unsigned char* pixels, const int* starts, const int* weights, unsigned rows, unsigned columns, unsigned taps,
    unsigned axis, unsigned row, unsigned column, unsigned channel) {
    unsigned place = axis == 0 ? row : column;
    int last = int(axis == 0 ? rows : columns) - 1;
    size_t stride = axis == 0 ? size_t(columns) * 3 : 3;
    const unsigned char* line = pixels + channel + (axis == 0 ? size_t(column) * 3 : size_t(row) * columns * 3);
    int start = starts[place];
    const int* line_weights = weights + size_t(place) * taps;
    int total = 1 << (IMAGE_WEIGHT_BITS - 1);
    for (unsigned k = 0; k < taps; ++k)
        total += int(line[size_t(min(max(start + int(k), 0), last)) * stride]) * line_weights[k];
    return min(max(total >> IMAGE_WEIGHT_BITS, 0), 255);
}

// Grid (values of a new row / threads, new rows): one thread a value.
extern "C" __global__ void resample(
    const unsigned char* pixels, const int* starts, const int* weights, unsigned char* resampled, unsigned rows,
    unsigned columns, unsigned new_columns, unsigned taps, unsigned axis) {
    unsigned value = blockIdx.x * blockDim.x + threadIdx.x;
    if (value >= 3 * new_columns) return;
    resampled[size_t(blockIdx.y) * new_columns * 3 + value] = resampled_value(
        pixels, starts, weights, rows, columns, taps, axis, blockIdx.y, value / 3, value % 3);
}

// One block a patch; its threads share the values of a frame.
template <class Compute>
__device__ inline void resample_patch(
    const unsigned char* pixels, const int* starts, const int* weights, const float* table, Compute* patches,
    unsigned rows, unsigned columns, unsigned new_columns, unsigned taps, unsigned axis, unsigned patch_size,
    unsigned merge_size, unsigned frames) {
    unsigned merged = merge_size * merge_size;
    unsigned block = blockIdx.x / merged, inner = blockIdx.x % merged;
    unsigned blocks_across = new_columns / (patch_size * merge_size);
    unsigned first_row = ((block / blocks_across) * merge_size + inner / merge_size) * patch_size;
    unsigned first_column = ((block % blocks_across) * merge_size + inner % merge_size) * patch_size;
    unsigned area = patch_size * patch_size;
    Compute* target = patches + size_t(blockIdx.x) * 3 * frames * area;
    for (unsigned i = threadIdx.x; i < 3 * area; i += blockDim.x) {
        unsigned channel = i / area, place = i % area;
        unsigned row = first_row + place / patch_size, column = first_column + place % patch_size;
        int value = resampled_value(pixels, starts, weights, rows, columns, taps, axis, row, column, channel);
        Compute normalized = Compute(table[channel * 256 + value]);
        for (unsigned frame = 0; frame < frames; ++frame)
            target[(size_t(channel) * frames + frame) * area + place] = normalized;
    }
}

#define RESAMPLE_TO_PATCHES(NAME, COMPUTE)                                                                            \
    extern "C" __global__ void NAME(                                                                                  \
        const unsigned char* pixels, const int* starts, const int* weights, const float* table, COMPUTE* patches,     \
        unsigned rows, unsigned columns, unsigned new_columns, unsigned taps, unsigned axis, unsigned patch_size,     \
        unsigned merge_size, unsigned frames) {                                                                       \
        resample_patch(                                                                                               \
            pixels, starts, weights, table, patches, rows, columns, new_columns, taps, axis, patch_size, merge_size,  \
            frames);                                                                                                  \
    }

RESAMPLE_TO_PATCHES(resample_to_patches_float32, float)
RESAMPLE_TO_PATCHES(resample_to_patches_float16, __half)
RESAMPLE_TO_PATCHES(resample_to_patches_bfloat16, __nv_bfloat16)
