#include "cuda/embedding_lookup.cuh"

// One block a token.
extern "C" __global__ void embedding_lookup(
    const char* table, const int* token_ids, char* inputs_embeds, unsigned vocabulary, size_t row_bytes) {
    look_up(table, token_ids[blockIdx.x], inputs_embeds + size_t(blockIdx.x) * row_bytes, vocabulary, row_bytes);
}
