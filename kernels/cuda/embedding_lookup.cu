#include "groups.cuh"

template <class T>
__device__ inline void copy_row(T* target, const T* source, size_t elements) {
    for (size_t i = threadIdx.x; i < elements; i += blockDim.x) target[i] = source == nullptr ? T{} : source[i];
}

// Copies rows of `row_bytes` bytes (an even number), whatever their dtype; zeros for an unknown id. One block a token.
extern "C" __global__ void embedding_lookup(
    const char* table, const int* token_ids, char* inputs_embeds, unsigned vocabulary, size_t row_bytes) {
    int token = token_ids[blockIdx.x];
    bool known = token >= 0 && unsigned(token) < vocabulary;
    const char* source = known ? table + size_t(token) * row_bytes : nullptr;
    char* target = inputs_embeds + size_t(blockIdx.x) * row_bytes;
    if (aligned_16(target) && aligned_16(source) && row_bytes % 16 == 0) {
        copy_row(reinterpret_cast<uint4*>(target), reinterpret_cast<const uint4*>(source), row_bytes / 16);
    } else {
        copy_row(reinterpret_cast<short*>(target), reinterpret_cast<const short*>(source), row_bytes / 2);
    }
}
