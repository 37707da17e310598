// One decode step, embeddings to logits, in one kernel: one block a multiprocessor, all blocks resident at once. Blocks
// wait for each other between phases (five a layer) while the weights of the next phases stream in.
#include "decode_attention.cuh"
#include "decode_linear.cuh"

namespace decode {

// Shared memory: the layers' addresses, the ring of weights, then a part that the phases use in turn.
template <typename T> __device__ __forceinline__ void step(const Arguments<T>& arguments) {
    extern __shared__ __align__(16) char shared[];
    const int layer_words = arguments.num_layers * static_cast<int>(sizeof(Layer<T>) / 8);
    const Layer<T>* layers = reinterpret_cast<const Layer<T>*>(shared);
    char* ring = shared + (layer_words * 8 + 127) / 128 * 128;
    char* work = ring + arguments.depth * SLOT;
    float* partial = reinterpret_cast<float*>(work);          // [2, WARPS, 2, 64]
    float* squares = partial + 2 * WARPS * 2 * 64;            // [UNIT, WARPS]
    char* activations = reinterpret_cast<char*>(squares + UNIT * WARPS);

    for (int i = threadIdx.x; i < layer_words; i += THREADS)
        reinterpret_cast<unsigned long long*>(shared)[i] = reinterpret_cast<const unsigned long long*>(arguments.layers)[i];
    __syncthreads();
    WeightStream<T> weights(arguments, layers, ring);
    GridBarrier barrier{arguments.barrier};

    const int batch = arguments.batch, size = arguments.hidden_size, inner = arguments.intermediate_size;
    const int query_size = arguments.heads * arguments.head_size;
    const int qkv_size = query_size + 2 * arguments.kv_heads * arguments.head_size;
    const Slices normalized(size, 4), context(query_size, sizeof(T)), activation(inner, sizeof(T));
    for (int index = 0;; ++index) {
        const bool last = index == arguments.num_layers;
        const Layer<T>& layer = layers[last ? 0 : index];
        const T* embeddings = index == 0 ? arguments.embeddings : nullptr;
        const T* norm = last ? arguments.norm : layer.input_norm;
        uint4 norm_weights = first_norm_weights(norm, size);
        if (index > 0) barrier.wait();
        stage_normalized(activations, squares, index == 0 ? nullptr : arguments.hidden, embeddings, norm, norm_weights,
                         arguments.epsilon, batch, size, normalized);
        linear<1>(weights, partial, activations, static_cast<const T*>(nullptr), normalized,
                  last ? nullptr : layer.qkv_bias, batch, last ? arguments.vocab_size : qkv_size, size,
                  FloatOutput{last ? arguments.logits : arguments.qkv});
        if (last) break;

        prefetch_kv(arguments, layer);
        barrier.wait();
        attention(arguments, layer, work);

        barrier.wait();
        if (arguments.stage_o) stage(activations, arguments.context, batch, query_size, context);
        linear<1>(weights, partial, activations, arguments.stage_o ? nullptr : arguments.context, context, layer.o_bias,
                  batch, size, query_size, ResidualOutput<T>{arguments.hidden, embeddings});

        norm_weights = first_norm_weights(layer.post_attention_norm, size);
        barrier.wait();
        stage_normalized(activations, squares, arguments.hidden, static_cast<const T*>(nullptr),
                         layer.post_attention_norm, norm_weights, arguments.epsilon, batch, size, normalized);
        linear<2>(weights, partial, activations, static_cast<const T*>(nullptr), normalized, layer.gate_up_bias, batch,
                  inner, size, SiluOutput<T>{arguments.activation});

        barrier.wait();
        if (arguments.stage_down) stage(activations, arguments.activation, batch, inner, activation);
        linear<1>(weights, partial, activations, arguments.stage_down ? nullptr : arguments.activation, activation,
                  layer.down_bias, batch, size, inner,
                  ResidualOutput<T>{arguments.hidden, static_cast<const T*>(nullptr)});
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace decode

extern "C" __global__ void __launch_bounds__(decode::THREADS, 1)
    decode_step_float16(const __grid_constant__ decode::Arguments<__half> arguments) {
    decode::step(arguments);
}

extern "C" __global__ void __launch_bounds__(decode::THREADS, 1)
    decode_step_bfloat16(const __grid_constant__ decode::Arguments<__nv_bfloat16> arguments) {
    decode::step(arguments);
}
