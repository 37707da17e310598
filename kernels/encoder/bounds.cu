// Values within bounds, between an encoder's linear layers: side by side, or what a gate lets through. A block has a row of
// the result, all of whose columns from the first of its own on it writes; its threads take WIDTH columns at a time.
#include "encoder/values.cuh"
#include "shared/plain_activations.cuh"

namespace encoder {

// Of two numbers in memory, the least and the most.
template <class Compute> struct Bounds {
    float least, most;
    __device__ __forceinline__ explicit Bounds(const void* bounds)
        : least(to_float(static_cast<const Compute*>(bounds)[0])), most(to_float(static_cast<const Compute*>(bounds)[1])) {}
    __device__ __forceinline__ float operator()(float x) const { return fminf(fmaxf(x, least), most); }
};

template <class In, class Compute, class Out, int WIDTH>
__global__ void __launch_bounds__(THREADS) clip_rows(const __grid_constant__ ClipRowsArguments a) {
    const unsigned begins = a.column, ends = begins + a.K;
    const Bounds<Compute> bounded(a.bounds);
    begin();
    for (unsigned column = begins + threadIdx.x * WIDTH; column < a.P; column += THREADS * WIDTH) {
        float values[WIDTH] = {};
        if (column < ends) {
            load<In, WIDTH>(reinterpret_cast<const char*>(a.values), size_t(blockIdx.x) * a.K + column - begins, values);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] = bounded(values[i]);
        }
        store<Out, WIDTH>(reinterpret_cast<char*>(a.output), size_t(blockIdx.x) * a.P + column, values);
    }
}

template <class Compute, int WIDTH>
__global__ void __launch_bounds__(THREADS) clipped_gate(const __grid_constant__ ClippedGateArguments a) {
    const Bounds<Compute> of_gate(a.gate_bounds), of_value(a.bounds);
    begin();
    for (unsigned column = threadIdx.x * WIDTH; column < a.K; column += THREADS * WIDTH) {
        const size_t place = size_t(blockIdx.x) * a.K + column;
        float gates[WIDTH], values[WIDTH];
        load<float, WIDTH>(reinterpret_cast<const char*>(a.gate), place, gates);
        load<float, WIDTH>(reinterpret_cast<const char*>(a.values), place, values);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] = plain_activation(of_gate(gates[i]), a.activation) * of_value(values[i]);
        store<Compute, WIDTH>(reinterpret_cast<char*>(a.output), place, values);
    }
}

}  // namespace encoder
