// Chains sampled from the draft: their tokens are drawn, and tested against the base (speculative sampling).
#include "acceptance/rows.cuh"

namespace acceptance {

constexpr int STOP_REJECTED = 1 << 16;

// Float uniform between 0 and 1, as of Draws.uniform.
__device__ inline float uniform(unsigned word) { return (__uint2float_rn(word) + 0.5f) * 0x1p-32f; }

// q of a target token; 0 where the draft has none.
struct DraftProbabilities {
    const float* row;
    const int* target_to_draft;
    unsigned draft_vocabulary;

    __device__ float of(unsigned target) const {
        unsigned id = target_to_draft[target];
        return id < draft_vocabulary ? row[id] : 0.0f;
    }
};

__device__ inline DraftProbabilities draft_probabilities(
    const Chain& chain, unsigned slot, unsigned step, unsigned steps, unsigned vocabulary) {
    return {chain.probabilities + ((size_t)slot * steps + step) * vocabulary, chain.target_to_draft, vocabulary};
}

}  // namespace acceptance

// First launch of a draft token's draw: logits over their temperature, and the largest. Grid (blocks of a row, slots).
__global__ void __launch_bounds__(ROW_THREADS, 4) draft_scale(DraftSampleArguments a, float* scaled, acceptance::Row* workspace, float* thresholds) {
    using namespace acceptance;
    __shared__ unsigned long long partial[MAXIMUM_WARPS];
    unsigned slot = blockIdx.y, vocabulary = a.U;
    const float* source = a.logits + (size_t)slot * vocabulary;
    float* target = scaled + (size_t)slot * vocabulary;
    float divisor = a.rows[slot].temperature == 0.0f ? 1.0f : a.rows[slot].temperature;
    bool aligned = aligned_16(source);
    unsigned long long best = 0;
    for (unsigned group = blockIdx.x * blockDim.x + threadIdx.x; group < group_count(vocabulary);
         group += gridDim.x * blockDim.x) {
        Group values = load_group(source, vocabulary, group, aligned);
        for (unsigned i = 0; i < 4 && 4 * group + i < vocabulary; ++i) {
            float value = values.value[i] / divisor;
            target[4 * group + i] = value;
            best = max(best, value_and_id(value, 4 * group + i));
        }
    }
    best = block_maximum(best, partial);
    if (threadIdx.x == 0) atomicMax(&workspace[slot].best, best);
}

// Second, after the thresholds: the sums of weights. Grid as of the first.
__global__ void draft_total(DraftSampleArguments a, float* scaled, acceptance::Row* workspace, float* thresholds) {
    using namespace acceptance;
    __shared__ unsigned long long partial[MAXIMUM_WARPS];
    unsigned slot = blockIdx.y, vocabulary = a.U;
    const float* values = scaled + (size_t)slot * vocabulary;
    Distribution q = row_distribution(values, thresholds[slot], 1.0f, workspace[slot]);
    unsigned long long total = 0;
    for (unsigned id = blockIdx.x * blockDim.x + threadIdx.x; id < vocabulary; id += gridDim.x * blockDim.x) {
        total += q.weight(values[id]);
    }
    total = block_sum(total, partial);
    if (threadIdx.x == 0) atomicAdd(&workspace[slot].total, total);
}

// Third: q, and Gumbel-max on log q. Grid as of the first.
__global__ void draft_draw(DraftSampleArguments a, float* scaled, acceptance::Row* workspace, float* thresholds) {
    using namespace acceptance;
    __shared__ unsigned long long partial[MAXIMUM_WARPS];
    unsigned slot = blockIdx.y, vocabulary = a.U;
    const float* values = scaled + (size_t)slot * vocabulary;
    float* probabilities = a.chain.probabilities + ((size_t)slot * a.D + a.step) * vocabulary;
    Row& row = workspace[slot];
    Distribution q = row_distribution(values, thresholds[slot], a.rows[slot].temperature, row);
    DrawWords random = draw_words(a.rows[slot], a.positions[slot] + a.step);
    bool aligned = aligned_16(values);
    unsigned long long best = 0;
    for (unsigned group = blockIdx.x * blockDim.x + threadIdx.x; group < group_count(vocabulary);
         group += gridDim.x * blockDim.x) {
        Group loaded = load_group(values, vocabulary, group, aligned);
        float probability[4];
        bool any = false;
        for (unsigned i = 0; i < 4; ++i) {
            bool inside = 4 * group + i < vocabulary;
            probability[i] = inside ? q.probability(loaded.value[i], 4 * group + i) : 0.0f;
            any |= probability[i] > 0.0f;
            if (inside) probabilities[4 * group + i] = probability[i];
        }
        if (!any) continue;
        uint4 words = random.words(group, DRAFT_STREAM);
        for (unsigned i = 0; i < 4; ++i) {
            if (!(probability[i] > 0.0f)) continue;
            float score = portable_log(probability[i]) + gumbel(word_of(words, i));
            best = max(best, value_and_id(score, 4 * group + i));
        }
    }
    best = block_maximum(best, partial);
    if (threadIdx.x != 0) return;
    atomicMax(&row.drawn_best, best);
    if (!last_of(&row.finished, gridDim.x)) return;
    int id = winning_id(atomicExch(&row.drawn_best, 0ull));
    a.chain.tokens[(size_t)slot * a.D + a.step] = a.chain.draft_to_target[id];
    row.best = 0, row.total = 0;
}

// Third launch of a sampled chain's acceptance, after its rows' totals: where each chain ends. A warp a slot; lane t
// tests the draft after node t. Grid (slots).
__global__ void chain_test(AcceptSampledChainArguments a) {
    using namespace acceptance;
    unsigned slot = blockIdx.x, node = threadIdx.x, tree_size = a.T, vocabulary = a.V, most = a.W;
    size_t first_row = (size_t)slot * tree_size;
    if (a.active[slot] != 1) {
        write_idle(a.accepted, most, slot);
        return;
    }
    Row* rows = rows_of(a.workspace, slot, tree_size);
    unsigned longest = min(min(tree_size - 1, a.D), most - 1);  // at most 32
    int token = node < longest ? a.tree.tokens[first_row + node + 1] : -1;
    bool drafted = token >= 0, accepts = false;
    if (drafted && unsigned(token) < vocabulary) {
        size_t row = first_row + node;
        const float* values = a.nodes.logits + row * vocabulary;
        Distribution p = row_distribution(values, a.nodes.thresholds[row], a.rows[slot].temperature, rows[node]);
        DraftProbabilities q = draft_probabilities(a.chain, slot, node, a.D, a.U);
        DrawWords random = draw_words(a.rows[slot], a.tree.draw_positions[row]);
        float p_of_token = p.probability(values[token], token);
        accepts = p_of_token > 0.0f && uniform(random.words(0, TEST_STREAM).x) * q.of(token) <= p_of_token;
    }
    unsigned ends = __ballot_sync(ALL_LANES, !accepts), rejections = __ballot_sync(ALL_LANES, drafted && !accepts);
    unsigned stop = ends == 0 ? 32 : __ffs(ends) - 1;
    bool rejected = stop < 32 && (rejections >> stop & 1);
    for (unsigned i = node; i < most; i += 32) {
        a.accepted.indices[(size_t)slot * most + i] = i <= stop ? int(i) : -1;
        a.accepted.ids[(size_t)slot * most + i] = i < stop ? a.tree.tokens[first_row + i + 1] : -1;
    }
    if (node == 0) {
        a.accepted.lengths[slot] = stop + 1;
        rows[0].stop = stop | (rejected ? STOP_REJECTED : 0);
    }
}

// Fourth: the last token, from max(p - q, 0) after a rejection, else from p. Grid (blocks of a row, slots).
__global__ void chain_draw(AcceptSampledChainArguments a) {
    using namespace acceptance;
    __shared__ unsigned long long partial[MAXIMUM_WARPS];
    __shared__ bool is_last;
    unsigned slot = blockIdx.y, tree_size = a.T, vocabulary = a.V;
    if (a.active[slot] != 1) return;
    size_t first_row = (size_t)slot * tree_size;
    Row* rows = rows_of(a.workspace, slot, tree_size);
    int stop = __ldcg(&rows[0].stop);
    bool rejected = stop & STOP_REJECTED;
    unsigned node = stop & (STOP_REJECTED - 1);
    size_t row = first_row + node;
    const float* values = a.nodes.logits + row * vocabulary;
    Distribution p = row_distribution(values, a.nodes.thresholds[row], a.rows[slot].temperature, rows[node]);
    DraftProbabilities q = draft_probabilities(a.chain, slot, node, a.D, a.U);
    DrawWords random = draw_words(a.rows[slot], a.tree.draw_positions[row]);
    bool aligned = aligned_16(values);
    unsigned long long best = 0, fallback = 0;
    for (unsigned group = blockIdx.x * blockDim.x + threadIdx.x; group < group_count(vocabulary);
         group += gridDim.x * blockDim.x) {
        Group loaded = load_group(values, vocabulary, group, aligned);
        bool possible[4];
        bool any = false;
        for (unsigned i = 0; i < 4; ++i) {
            unsigned id = 4 * group + i;
            possible[i] = id < vocabulary && p.may_be_drawn(loaded.value[i], id);
            any |= possible[i];
        }
        if (!any) continue;
        uint4 words = random.words(group, rejected ? RESIDUAL_STREAM : TARGET_STREAM);
        for (unsigned i = 0; i < 4; ++i) {
            if (!possible[i]) continue;
            unsigned id = 4 * group + i;
            float noise = gumbel(word_of(words, i));
            if (!rejected) {
                best = max(best, value_and_id(without_nan(loaded.value[i]) + noise, id));
                continue;
            }
            float probability = p.probability(loaded.value[i], id);
            float residual = probability - q.of(id);
            if (residual > 0.0f) best = max(best, value_and_id(portable_log(residual) + noise, id));
            if (probability > 0.0f) fallback = max(fallback, value_and_id(portable_log(probability) + noise, id));
        }
    }
    best = block_maximum(best, partial);
    fallback = block_maximum(fallback, partial);
    if (threadIdx.x == 0) {
        atomicMax(&rows[0].drawn_best, best);
        atomicMax(&rows[0].drawn_fallback, fallback);
        is_last = last_of(&rows[0].finished, gridDim.x);
    }
    __syncthreads();
    if (!is_last) return;
    if (threadIdx.x == 0) {
        unsigned long long winner = atomicExch(&rows[0].drawn_best, 0ull);
        unsigned long long second = atomicExch(&rows[0].drawn_fallback, 0ull);
        a.accepted.ids[(size_t)slot * a.W + node] = winning_id(winner != 0 ? winner : second);
    }
    for (unsigned i = threadIdx.x; i < tree_size; i += blockDim.x) {
        rows[i].best = 0, rows[i].total = 0, rows[i].distance = 0;
    }
}
