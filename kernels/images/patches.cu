// Resampling of images in two passes of whole numbers, the second of which also makes the rows of a vision encoder. See
// edgellm.kernels.images.contract.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "images/arguments.cuh"

// One channel of the pixel at (row, column) of an image of `rows` x `columns`, resampled along an axis from `taps` pixels.
__device__ inline int resampled_value(
    const unsigned char* pixels, const ResamplingTables& tables, unsigned rows, unsigned columns, unsigned taps,
    unsigned row, unsigned column, unsigned channel) {
    unsigned place = tables.axis == 0 ? row : column;
    int last = int(tables.axis == 0 ? rows : columns) - 1;
    size_t stride = tables.axis == 0 ? size_t(columns) * 3 : 3;
    const unsigned char* line = pixels + channel + (tables.axis == 0 ? size_t(column) * 3 : size_t(row) * columns * 3);
    int start = tables.starts[place];
    const int* line_weights = tables.weights + size_t(place) * taps;
    int total = 1 << (WEIGHT_BITS - 1);
    for (unsigned k = 0; k < taps; ++k)
        total += int(line[size_t(min(max(start + int(k), 0), last)) * stride]) * line_weights[k];
    return min(max(total >> WEIGHT_BITS, 0), 255);
}

// Grid (values of a new row / threads, new rows): one thread a value.
__global__ void resample(ResampleArguments a) {
    unsigned value = blockIdx.x * blockDim.x + threadIdx.x;
    if (value >= 3 * a.X) return;
    a.resampled[size_t(blockIdx.y) * a.X * 3 + value] =
        resampled_value(a.pixels, a.tables, a.S, a.W, a.K, blockIdx.y, value / 3, value % 3);
}

// One block a patch; its threads share the values of a frame.
template <class Compute>
__global__ void resample_to_patches(ResampleToPatchesArguments a) {
    unsigned patch_size = a.grid.patch_size, merge_size = a.grid.merge_size, area = patch_size * patch_size;
    unsigned merged = merge_size * merge_size, frames = a.E / (3 * area);
    unsigned block = blockIdx.x / merged, inner = blockIdx.x % merged;
    unsigned blocks_across = (a.tables.axis == 0 ? a.W : a.A) / (patch_size * merge_size);
    unsigned first_row = ((block / blocks_across) * merge_size + inner / merge_size) * patch_size;
    unsigned first_column = ((block % blocks_across) * merge_size + inner % merge_size) * patch_size;
    Compute* target = reinterpret_cast<Compute*>(a.patches) + size_t(blockIdx.x) * 3 * frames * area;
    for (unsigned i = threadIdx.x; i < 3 * area; i += blockDim.x) {
        unsigned channel = i / area, place = i % area;
        unsigned row = first_row + place / patch_size, column = first_column + place % patch_size;
        int value = resampled_value(a.pixels, a.tables, a.S, a.W, a.K, row, column, channel);
        Compute normalized = Compute(a.table[channel * 256 + value]);
        for (unsigned frame = a.grid.first_frame; frame < frames; ++frame)
            target[(size_t(channel) * frames + frame) * area + place] = normalized;
    }
}
