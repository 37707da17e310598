// What becomes of an encoder's rows between its linear layers: norms, activations, rows that are copied, added, or averaged
// over squares. A block has a row of the result, all of which it writes; its threads take WIDTH columns at a time. What
// convolutions read is gathered by one thread an element.
#include "encoder/values.cuh"
#include "shared/plain_activations.cuh"
#include "shared/reductions.cuh"

namespace encoder {

// The row in shared memory is read by the thread alone that has written it. Sums: of a thread's columns, from the first on,
// then of the threads.
template <class In, class Compute, class Out, int WIDTH>
__global__ void __launch_bounds__(THREADS) norm(const __grid_constant__ NormArguments a) {
    extern __shared__ float row[];
    __shared__ float partial[MAXIMUM_WARPS];
    const char *weights = reinterpret_cast<const char*>(a.weight), *biases = reinterpret_cast<const char*>(a.bias);
    const size_t first = size_t(blockIdx.x) * a.K;
    const bool is_layer_norm = biases != nullptr;
    float mean = 0.f, sum = 0.f;
    if (a.next_early) launch_next_kernel();
    wait_for_previous_kernel();
    if (!a.next_early) launch_next_kernel();
    for (unsigned column = threadIdx.x * WIDTH; column < a.K; column += THREADS * WIDTH) {
        float values[WIDTH];
        load<In, WIDTH>(a.values, first + column, values);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) row[column + i] = values[i], sum += values[i];
    }
    if (is_layer_norm) mean = block_sum(sum, partial) / float(a.K);
    float squares = 0.f;
    for (unsigned column = threadIdx.x * WIDTH; column < a.K; column += THREADS * WIDTH)
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float distance = row[column + i] - mean;
            squares = fmaf(distance, distance, squares);
        }
    const float factor = 1.f / sqrtf(block_sum(squares, partial) / float(a.K) + float(a.epsilon));
    const float offset = float(a.offset);
    for (unsigned column = threadIdx.x * WIDTH; column < a.P; column += THREADS * WIDTH) {
        float normed[WIDTH] = {};
        if (column < a.K) {
            float weight[WIDTH], bias[WIDTH] = {};
            load<Compute, WIDTH>(weights, column, weight);
            if (is_layer_norm) load<Compute, WIDTH>(biases, column, bias);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                const float value = (row[column + i] - mean) * factor;
                normed[i] = is_layer_norm ? fmaf(value, weight[i], bias[i]) : value * (weight[i] + offset);
            }
        }
        store<Out, WIDTH>(a.output, size_t(blockIdx.x) * a.P + column, normed);
    }
}

template <class Compute, int WIDTH>
__global__ void __launch_bounds__(THREADS) activate(const __grid_constant__ ActivateArguments a) {
    begin();
    for (unsigned column = threadIdx.x * WIDTH; column < a.P; column += THREADS * WIDTH) {
        float values[WIDTH] = {};
        if (column < a.K) {
            load<float, WIDTH>(reinterpret_cast<const char*>(a.values), size_t(blockIdx.x) * a.K + column, values);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] = plain_activation(values[i], a.activation);
        }
        store<Compute, WIDTH>(a.output, size_t(blockIdx.x) * a.P + column, values);
    }
}

template <class In, class Out, int WIDTH>
__global__ void __launch_bounds__(THREADS) copy_rows(const __grid_constant__ CopyRowsArguments a) {
    const unsigned begins = a.column, ends = begins + a.K;
    begin();
    const int chosen = a.rows == nullptr ? int(blockIdx.x) : __ldcg(a.rows + blockIdx.x);
    const size_t source = size_t(min(max(chosen, 0), int(a.S) - 1)) * a.K;
    for (unsigned column = begins + threadIdx.x * WIDTH; column < a.P; column += THREADS * WIDTH) {
        float values[WIDTH] = {};
        if (column < ends) load<In, WIDTH>(a.values, source + column - begins, values);
        store<Out, WIDTH>(a.output, size_t(blockIdx.x) * a.P + column, values);
    }
}

template <class In, class Other, int WIDTH>
__global__ void __launch_bounds__(THREADS) add_rows(const __grid_constant__ AddRowsArguments a) {
    begin();
    for (unsigned column = threadIdx.x * WIDTH; column < a.K; column += THREADS * WIDTH) {
        const size_t place = size_t(blockIdx.x) * a.K + column;
        float values[WIDTH], others[WIDTH];
        load<In, WIDTH>(a.values, place, values);
        load<Other, WIDTH>(a.other, place, others);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] += others[i];
        store<float, WIDTH>(reinterpret_cast<char*>(a.output), place, values);
    }
}

template <class Compute, int WIDTH>
__global__ void __launch_bounds__(THREADS) add_scaled_rows(const __grid_constant__ AddScaledRowsArguments a) {
    begin();
    for (unsigned column = threadIdx.x * WIDTH; column < a.K; column += THREADS * WIDTH) {
        const size_t place = size_t(blockIdx.x) * a.K + column;
        float values[WIDTH], others[WIDTH], scales[WIDTH];
        load<float, WIDTH>(reinterpret_cast<const char*>(a.values), place, values);
        load<float, WIDTH>(reinterpret_cast<const char*>(a.other), place, others);
        load<Compute, WIDTH>(reinterpret_cast<const char*>(a.scale), column, scales);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] = fmaf(others[i], scales[i], values[i]);
        store<float, WIDTH>(reinterpret_cast<char*>(a.output), place, values);
    }
}

template <class In, class Out>
__global__ void __launch_bounds__(THREADS) unfold(const __grid_constant__ UnfoldArguments a) {
    const size_t element = size_t(blockIdx.x) * THREADS + threadIdx.x;
    const auto& of = a.convolution;
    const unsigned height = of.height, width = of.width, down = of.down, across = of.across, stride = of.stride;
    const unsigned columns = (width + 2 * of.left - across) / stride + 1, rows = (height + 2 * of.above - down) / stride + 1;
    const unsigned row = element / a.P, column = element % a.P;
    const unsigned channel = column / (down * across), place = column % (down * across), in_image = row % (rows * columns);
    const int y = int(in_image / columns * stride + place / across) - int(of.above);
    const int x = int(in_image % columns * stride + place % across) - int(of.left);
    const bool is_inside = channel < of.channels && y >= 0 && y < int(height) && x >= 0 && x < int(width);
    begin();
    if (row >= a.R) return;
    float value[1] = {};
    if (is_inside) {
        const size_t source = size_t(row / (rows * columns)) * height * width + size_t(y) * width + x;
        load<In, 1>(a.values, source * a.K + channel, value);
    }
    store<Out, 1>(a.output, element, value);
}

template <class In, int WIDTH>
__global__ void __launch_bounds__(THREADS) average_pool(const __grid_constant__ AveragePoolArguments a) {
    const unsigned size = a.size, side = a.side, squares = side / size;
    const size_t first = size_t(blockIdx.x / squares) * size * side + blockIdx.x % squares * size;
    const float share = 1.f / float(size * size);
    begin();
    for (unsigned column = threadIdx.x * WIDTH; column < a.K; column += THREADS * WIDTH) {
        float total[WIDTH] = {};
        for (unsigned across = 0; across < size; ++across) {
            float sum[WIDTH] = {};
            for (unsigned down = 0; down < size; ++down) {
                float values[WIDTH];
                load<In, WIDTH>(a.values, (first + size_t(down) * side + across) * a.K + column, values);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) sum[i] += values[i];
            }
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) total[i] += sum[i];
        }
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) total[i] *= share;
        store<float, WIDTH>(reinterpret_cast<char*>(a.output), size_t(blockIdx.x) * a.K + column, total);
    }
}

}  // namespace encoder
