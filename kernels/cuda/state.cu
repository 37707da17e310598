constexpr int IN_PROMPT = 1 << 30;

// Marks the tokens of a prompt in a cleared row of counts.
extern "C" __global__ void count_tokens(
    const int* token_ids, int* token_counts, unsigned tokens, unsigned vocabulary) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= tokens) return;
    unsigned token = token_ids[i];
    if (token < vocabulary) atomicOr(token_counts + token, IN_PROMPT);
}

// Each active sequence takes its token as the next input. One thread a sequence.
extern "C" __global__ void advance_state(
    const int* tokens, const int* active, int* token_ids, int* kvcache_start_index, int* positions, int* token_counts,
    int* emitted, unsigned sequences, unsigned vocabulary) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= sequences) return;
    if (active[i] != 1) {
        emitted[i] = -1;
        return;
    }
    int token = tokens[i];
    token_ids[i] = token;
    kvcache_start_index[i] += 1;
    positions[i] += 1;
    emitted[i] = token;
    if (unsigned(token) < vocabulary) token_counts[(size_t)i * vocabulary + token] += 1;
}
