// What the host passes to the decode step; `DecodeArguments` and `LAYER_FIELDS` of decode_kernels.py mirror it.
#pragma once

namespace decode {

// Device addresses of one layer's weights and caches; an absent one is null. Matrices are [N, K].
template <typename T> struct Layer {
    const T* input_norm;
    const T* qkv;
    const T* qkv_bias;
    const T* q_norm;
    const T* k_norm;
    const T* o;
    const T* o_bias;
    const T* post_attention_norm;
    const T* gate_up;
    const T* gate_up_bias;
    const T* down;
    const T* down_bias;
    T* k_cache;
    T* v_cache;
};

template <typename T> struct Arguments {
    const Layer<T>* layers;  // [num_layers]
    const T* embeddings;     // [B, H]
    const T* cos_sin;        // [B, R]
    const int* start_index;  // [B]
    const T* norm;           // [H]
    const T* head;           // [V, H]
    float* logits;           // [B, V]
    float* hidden;           // [B, H]
    float* qkv;              // [B, (n_q + 2 n_kv) D]
    T* context;              // [B, n_q D]
    T* activation;           // [B, F]
    float* partial;          // [B, n_q, splits, D + 2]
    unsigned* counters;      // [B, n_kv], zero between launches
    unsigned long long* barrier;
    float epsilon, scale;    // scale: D^-1/2 log2(e)
    int num_layers, batch, hidden_size, intermediate_size, vocab_size, heads, kv_heads, head_size, rotary, kv_rows;
    int splits, depth, stage_o, stage_down;  // stage: activations fit into shared memory
};

}  // namespace decode
