// Short convolutions: of the nodes of a step that keeps its inputs, of a chunk of a prompt, and what makes the columns.
#include "recurrent/values.cuh"

namespace recurrent {

constexpr int THREADS = 128, TILE = 32, BATCH = 8;  // tokens of a block's threads in a chunk, and those in flight
static_assert(THREADS == HOST_CONVOLUTION_THREADS && TILE == HOST_CONVOLUTION_TILE, "the host makes the grids");

// One channel of one sequence.
template <class Value, class Output, int TAPS> struct Channel {
    static constexpr int KEPT = TAPS - 1;
    const ShortConvolutionArguments& a;
    unsigned slot, channel;
    float taps[TAPS], bias;

    __device__ Channel(const ShortConvolutionArguments& a, unsigned slot, unsigned channel)
        : a(a), slot(slot), channel(channel), bias(0.0f) {
        if (channel >= a.C) return;
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) taps[tap] = __ldg(a.convolution.weight + channel * TAPS + tap);
        if (a.bias != nullptr) bias = __ldg(a.bias + channel);
    }

    __device__ size_t row(unsigned token) const { return size_t(slot) * a.T + token; }
    __device__ float* columns() const { return a.columns + (size_t(slot) * a.C + channel) * KEPT; }

    // What is convolved at a token, or at a place before the first one: -1 is the latest column.
    __device__ float input(int token) const {
        if (token < 0) return __ldcg(columns() + KEPT + token);
        const size_t first = row(token) * a.V + a.convolution.first + channel;
        const float value = loaded<Value>(a.value, first);
        return a.convolution.gated ? value * loaded<Value>(a.value, first + 2 * a.C) : value;
    }

    // What a token's inputs give, the earliest first.
    __device__ void put_out(int token, const float (&inputs)[TAPS]) const {
        float result = taps[0] * inputs[0];
#pragma unroll
        for (int tap = 1; tap < TAPS; ++tap) result += taps[tap] * inputs[tap];
        if (a.bias != nullptr) result += bias;
        if (a.convolution.silu) result = portable_silu(result);
        if (a.convolution.gated) result = loaded<Value>(a.value, row(token) * a.V + a.C + channel) * result;
        reinterpret_cast<Output*>(a.output)[row(token) * a.C + channel] = rounded<Output>(result);
    }
};

// Grid: blocks of channels, tokens, sequences. With `parents` up to HOST_MOST_NODES tokens.
template <class Value, class Output, int TAPS>
__global__ void __launch_bounds__(THREADS) convolve_nodes(const __grid_constant__ ShortConvolutionArguments a) {
    __shared__ int parents[HOST_MOST_NODES];
    const unsigned node = blockIdx.y;
    launch_next_kernel();
    const Channel<Value, Output, TAPS> own(a, blockIdx.z, blockIdx.x * THREADS + threadIdx.x);
    wait_for_previous_kernel();
    if (a.parents != nullptr) {
        for (unsigned i = threadIdx.x; i <= node; i += THREADS) parents[i] = earlier(__ldcg(a.parents + own.row(i)), i);
        __syncthreads();
    }
    if (own.channel >= a.C) return;
    float inputs[TAPS];
    int token = node;
#pragma unroll
    for (int tap = TAPS - 1; tap >= 0; --tap) {
        inputs[tap] = own.input(token);
        token = token >= 0 && a.parents != nullptr ? parents[token] : token - 1;
    }
    if (a.kept != nullptr) a.kept[own.row(node) * a.C + own.channel] = inputs[TAPS - 1];
    own.put_out(node, inputs);
}

// Grid: blocks of channels, tiles of tokens, sequences. The block of the first tile, which alone reads the columns, writes
// those behind the tokens that count.
template <class Value, class Output, int TAPS>
__global__ void __launch_bounds__(THREADS) convolve_chunk(const __grid_constant__ ShortConvolutionArguments a) {
    constexpr int KEPT = TAPS - 1;
    const int begin = blockIdx.y * TILE, tokens = a.T, end = min(begin + TILE, tokens);
    launch_next_kernel();
    const Channel<Value, Output, TAPS> own(a, blockIdx.z, blockIdx.x * THREADS + threadIdx.x);
    wait_for_previous_kernel();
    if (own.channel >= a.C) return;
    float inputs[KEPT + BATCH];
#pragma unroll
    for (int i = 0; i < KEPT; ++i) inputs[i] = own.input(begin - KEPT + i);
    for (int first = begin; first < end; first += BATCH) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) inputs[KEPT + i] = first + i < end ? own.input(first + i) : 0.0f;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            float window[TAPS];
#pragma unroll
            for (int tap = 0; tap < TAPS; ++tap) window[tap] = inputs[i + tap];
            if (first + i < end) own.put_out(first + i, window);
        }
#pragma unroll
        for (int i = 0; i < KEPT; ++i) inputs[i] = inputs[BATCH + i];
    }
    if (begin > 0) return;
    const int count = min(max(__ldcg(a.state_tokens + own.slot), 0), tokens);
#pragma unroll
    for (int i = 0; i < KEPT; ++i) inputs[i] = own.input(count - KEPT + i);
#pragma unroll
    for (int i = 0; i < KEPT; ++i) own.columns()[i] = inputs[i];
}

// The columns and kept inputs of layers of one shape.
struct CommitColumns {
    const int *indices, *counts;
    unsigned batch, tokens, most, channels;
    float* columns[HOST_MOST_LAYERS];
    const float* inputs[HOST_MOST_LAYERS];
};
static_assert(sizeof(CommitColumns) == HOST_COMMIT_COLUMNS_BYTES, "as the host's structure");

// Grid: blocks of channels, layers, sequences.
template <int TAPS> __global__ void __launch_bounds__(THREADS) commit_columns(const __grid_constant__ CommitColumns a) {
    constexpr int KEPT = TAPS - 1;
    const unsigned channel = blockIdx.x * THREADS + threadIdx.x, slot = blockIdx.z;
    launch_next_kernel();
    wait_for_previous_kernel();
    const int count = min(max(__ldcg(a.counts + slot), 0), int(a.most));
    if (count == 0 || channel >= a.channels) return;
    float* columns = a.columns[blockIdx.y] + (size_t(slot) * a.channels + channel) * KEPT;
    const float* inputs = a.inputs[blockIdx.y] + size_t(slot) * a.tokens * a.channels + channel;
    float found[KEPT];
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        const int place = count - KEPT + i;
        if (place < 0) {
            found[i] = __ldcg(columns + KEPT + place);
        } else {
            const int node = __ldcg(a.indices + size_t(slot) * a.most + place);
            found[i] = __ldcg(inputs + size_t(min(max(node, 0), int(a.tokens) - 1)) * a.channels);
        }
    }
#pragma unroll
    for (int i = 0; i < KEPT; ++i) columns[i] = found[i];
}

}  // namespace recurrent
