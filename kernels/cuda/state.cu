constexpr int IN_PROMPT = 1 << 30;

// Marks the tokens of a prompt in a cleared row of counts.
extern "C" __global__ void count_tokens(
    const int* token_ids, int* token_counts, unsigned tokens, unsigned vocabulary) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= tokens) return;
    unsigned token = token_ids[i];
    if (token < vocabulary) atomicOr(token_counts + token, IN_PROMPT);
}
