// Log-mel features of sounds: a frame's transform as products with cosines and sines, for which the places n and
// transform - n are put together, their sum (even) and their difference (odd), so that half are left. Each sum has one
// order, whatever is beside it. See edgellm.kernels.sounds.contract.
#include "shared/ordered_keys.cuh"
#include "sounds/arguments.cuh"

constexpr unsigned WARP = 32;

// Grid (tiles of frames, parts), a thread for each frequency. Shared memory: even and odd places [K][PITCH] of the tile's frames, which its powers take
// the place of, and its samples.
__global__ void measure_sounds(MeasureSoundsArguments a) {
    extern __shared__ __align__(16) float shared[];
    __shared__ float largest[WARP];
    const MelTables& tables = a.tables;
    const float* window = reinterpret_cast<const float*>(tables.window);
    const float* filters = reinterpret_cast<const float*>(tables.filters);
    const float *cosines = tables.waves, *sines = cosines + size_t(a.K) * a.K;
    float *even = shared, *odd = even + a.K * PITCH, *own = odd + a.K * PITCH;
    unsigned part = blockIdx.y, first = blockIdx.x * TILE, transform = tables.transform, hop = tables.hop;
    size_t row = size_t(a.slots[part]) * a.R + first;
    unsigned frames = max(0, min(a.counts[part] - int(first), TILE));
    for (unsigned i = threadIdx.x; i < (TILE - 1) * hop + a.Z; i += blockDim.x) {
        unsigned place = first * hop + i;
        own[i] = place < a.W ? a.samples[size_t(part) * a.W + place] : 0.0f;
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < TILE * a.K; i += blockDim.x) {
        unsigned frame = i / a.K, n = i % a.K, mirrored = transform - n;
        const float* sample = own + frame * hop;
        float left = n < a.Z ? sample[n] * window[n] : 0.0f;
        float right = n > 0 && n < mirrored && mirrored < a.Z ? sample[mirrored] * window[mirrored] : 0.0f;
        even[n * PITCH + frame] = left + right;
        odd[n * PITCH + frame] = left - right;
    }
    __syncthreads();
    unsigned k = threadIdx.x;
    float real[TILE] = {}, imaginary[TILE] = {};
#pragma unroll 4
    for (unsigned n = 0; k < a.K && n < a.K; ++n) {
        float cosine = cosines[size_t(n) * a.K + k], sine = sines[size_t(n) * a.K + k];
#pragma unroll
        for (unsigned frame = 0; frame < TILE; ++frame) {
            real[frame] = fmaf(even[n * PITCH + frame], cosine, real[frame]);
            imaginary[frame] = fmaf(odd[n * PITCH + frame], sine, imaginary[frame]);
        }
    }
    __syncthreads();
#pragma unroll
    for (unsigned frame = 0; frame < TILE; ++frame) {
        float power = fmaf(imaginary[frame], imaginary[frame], real[frame] * real[frame]);
        if (k < a.K) even[k * PITCH + frame] = tables.magnitudes ? sqrtf(power) : power;
    }
    __syncthreads();
    float most = minus_infinity(), least = float(tables.least);
    for (unsigned i = threadIdx.x; i < frames * a.B; i += blockDim.x) {
        unsigned frame = i / a.B, band = i % a.B;
        float sum = 0.0f;
        for (int k = tables.ranges[2 * band]; k < tables.ranges[2 * band + 1]; ++k)
            sum = fmaf(even[k * PITCH + frame], filters[size_t(band) * a.K + k], sum);
        float found = tables.magnitudes ? logf(sum + least) : log10f(fmaxf(sum, least));
        a.logarithms[(row + frame) * a.B + band] = found;
        most = fmaxf(most, found);
    }
    for (unsigned step = WARP / 2; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    if (threadIdx.x % WARP == 0) largest[threadIdx.x / WARP] = most;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (unsigned warp = 1; warp < blockDim.x / WARP; ++warp) most = fmaxf(most, largest[warp]);
    a.maxima[size_t(part) * a.T + blockIdx.x] = most;
}

// One thread a value.
__global__ void place_features(PlaceFeaturesArguments a) {
    size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= a.N) return;
    unsigned chunk = a.placing.chunk, inside = i % (size_t(chunk) * a.B);
    size_t frame = i / (size_t(chunk) * a.B) * chunk + inside % chunk;
    float value = 0.0f;
    if (frame < size_t(a.placing.frames)) {
        size_t row = size_t(a.slots[frame / a.R]) * a.R + frame % a.R;
        value = a.logarithms[row * a.B + inside / chunk];
        if (a.placing.scaled) value = (fmaxf(value, float(a.placing.floor)) + 4.0f) / 4.0f;
    }
    a.features[i] = value;
}
