// The gated delta rule, and with HOST_SCAN the selective scan of Mamba-2, whose keys are B, whose queries are C, and in which
// nothing is read of the matrix for its change. A block walks through tokens with some columns of one head's matrix, an
// element of the value each: the walkers' registers hold them, a group of 16 lanes each column, while the helpers make the
// next tokens' vectors ready in shared memory. Nothing but the next token waits for a sum over lanes: a token's output is
// computed beside the matrix behind it.
#include "recurrent/tree_plan.cuh"
#include "recurrent/values.cuh"

namespace recurrent {

constexpr bool SCAN = HOST_SCAN;
#if HOST_SCAN
using Arguments = SelectiveScanArguments;
#else
using Arguments = GatedDeltaArguments;
#endif
constexpr unsigned WALKERS = 4, HELPERS = 2, THREADS = 32 * (WALKERS + HELPERS);  // warps
constexpr unsigned WALKING_GROUPS = 32 * WALKERS / LANES, HELPING_GROUPS = 32 * HELPERS / LANES;
// Blocks of a multiprocessor, for whose registers the kernels are compiled: a single token asks for few, and waits for
// memory alone; a commit of one, which reads and writes all matrices of a model, has none of its outputs to hold.
constexpr unsigned BLOCKS = 2, BLOCKS_OF_ONE = 4, BLOCKS_OF_COMMIT = 6;
static_assert(THREADS == HOST_DELTA_THREADS, "the host launches them");

// Of keys that are padded to SIZE elements: how many columns a lane has, and how many tokens are ready at once.
template <int SIZE> struct Sizes {
    static constexpr int PARTS = SIZE / int(WIDTH), COLUMNS = SIZE > 128 ? 1 : 2, TOKENS = 2048 / SIZE;
    static constexpr unsigned BLOCK_COLUMNS = WALKING_GROUPS * COLUMNS;
    // Of a token: key, query, the block's values, then decay, beta, key times query, and what values are multiplied by that
    // a scan puts out beside.
    static constexpr unsigned QUERY = SIZE, VALUES = 2 * SIZE, SCALARS = VALUES + BLOCK_COLUMNS, RECORD = SCALARS + 4;
    static constexpr unsigned READY = 2 * TOKENS * RECORD;  // floats of shared memory, then matrices of a tree's nodes
    static constexpr unsigned SAVED = 32 * WALKERS * COLUMNS * PARTS * 4;
    static constexpr unsigned BYTES = 4 * READY, TREE_BYTES = BYTES + 4 * MOST_SAVED * SAVED;
};
static_assert(Sizes<HOST_SIZE>::BYTES == HOST_BYTES && Sizes<HOST_SIZE>::TREE_BYTES == HOST_TREE_BYTES &&
                  Sizes<HOST_SIZE>::BLOCK_COLUMNS == HOST_COLUMNS,
              "the host gives the shared memory and makes the grid");

// One head of one sequence. Token `first + row * stride` of what has a row for each token.
struct Head {
    const float* rows;      // of the sequence, `row_size` floats each
    const float* own_state; // [values, keys]
    float* next_state;      // the same memory, or null where the state stays
    float* outputs;         // of the head, `output_size` apart; null where there are none
    unsigned row_size, query, key, value, keys, values, output_size, count;
};

// What a lane holds of a token.
template <int SIZE> struct Token {
    float4 key[Sizes<SIZE>::PARTS], query[Sizes<SIZE>::PARTS];
    float value[Sizes<SIZE>::COLUMNS], decay, beta, both, skip;

    __device__ __forceinline__ Token(const float* record, unsigned group, unsigned lane) {
        using Own = Sizes<SIZE>;
#pragma unroll
        for (int part = 0; part < Own::PARTS; ++part) {
            key[part] = *reinterpret_cast<const float4*>(record + part * WIDTH + 4 * lane);
            query[part] = *reinterpret_cast<const float4*>(record + Own::QUERY + part * WIDTH + 4 * lane);
        }
#pragma unroll
        for (int column = 0; column < Own::COLUMNS; ++column)
            value[column] = record[Own::VALUES + group * Own::COLUMNS + column];
        const float4 scalars = *reinterpret_cast<const float4*>(record + Own::SCALARS);
        decay = scalars.x, beta = scalars.y, both = scalars.z, skip = scalars.w;
    }
};

// A lane's part of its columns.
template <int SIZE> struct Matrix {
    static constexpr int COLUMNS = Sizes<SIZE>::COLUMNS, PARTS = Sizes<SIZE>::PARTS;
    float4 own[COLUMNS][PARTS];

    __device__ __forceinline__ void load(const float* state, unsigned column, unsigned lane, const Head& head) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const bool exists = column + i < head.values;
            load_vector(state + size_t(exists ? column + i : 0) * head.keys, lane, exists ? head.keys : 0, own[i]);
        }
    }

    __device__ __forceinline__ void store(float* state, unsigned column, unsigned lane, const Head& head) const {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const unsigned first = part * WIDTH + 4 * lane;
                if (column + i < head.values && first < head.keys)
                    *reinterpret_cast<float4*>(state + size_t(column + i) * head.keys + first) = own[i][part];
            }
        }
    }

    // To and from a place in shared memory that is the thread's own.
    __device__ __forceinline__ void save(float4* place) const {
#pragma unroll
        for (int i = 0; i < COLUMNS * PARTS; ++i) place[i * 32 * WALKERS + threadIdx.x] = own[i / PARTS][i % PARTS];
    }

    __device__ __forceinline__ void restore(const float4* place) {
#pragma unroll
        for (int i = 0; i < COLUMNS * PARTS; ++i) own[i / PARTS][i % PARTS] = place[i * 32 * WALKERS + threadIdx.x];
    }

    // The matrix behind a token, and what the token puts out.
    template <bool OUTPUTS> __device__ __forceinline__ void step(const Token<SIZE>& token, float (&outputs)[COLUMNS]) {
        float read[COLUMNS], asked[COLUMNS];
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            if (!SCAN) read[i] = fused_share(own[i], token.key);
            if (OUTPUTS) asked[i] = fused_share(own[i], token.query);
        }
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i)
            if (!SCAN) read[i] = sum_of_lanes(read[i]);
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const float change = SCAN ? token.value[i] : fmaf(-token.decay, read[i], token.value[i]);
            const float delta = change * token.beta;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                float4& four = own[i][part];
                const float4& key = token.key[part];
                four.x = fmaf(key.x, delta, token.decay * four.x), four.y = fmaf(key.y, delta, token.decay * four.y);
                four.z = fmaf(key.z, delta, token.decay * four.z), four.w = fmaf(key.w, delta, token.decay * four.w);
            }
            if (OUTPUTS) outputs[i] = fmaf(delta, token.both, token.decay * sum_of_lanes(asked[i]));
            if (OUTPUTS && SCAN) outputs[i] = fmaf(token.skip, token.value[i], outputs[i]);
        }
    }
};

// Make tokens `begin` on, up to as many as are ready at once, ready in `records`: each by one of `groups` groups, BATCH of
// which are under way at once. `source` gives the row of a token, its decay and its beta.
template <int SIZE, bool OUTPUTS, int BATCH, class Source>
__device__ __forceinline__ void prepare(
    const Head& head, const Source& source, unsigned begin, float* records, unsigned group, unsigned groups) {
    using Own = Sizes<SIZE>;
    const unsigned lane = threadIdx.x % LANES, first = blockIdx.x * Own::BLOCK_COLUMNS;
    const unsigned end = min(begin + Own::TOKENS, head.count);
    // The lanes of a warp stay together: where one of its groups has no token, the last one is computed again, and dropped.
    const unsigned leader = group & ~1u;
    for (unsigned base = begin; base < end; base += groups * BATCH) {
        float4 key[BATCH][Own::PARTS], query[BATCH][Own::PARTS];
        float value[BATCH], decay[BATCH], beta[BATCH];
        unsigned row[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {  // all loads first
            if (base + i * groups + leader >= end) break;
            row[i] = source.row(min(base + i * groups + group, end - 1));
            const float* values = head.rows + size_t(row[i]) * head.row_size;
            load_vector(values + head.key, lane, head.keys, key[i]);
            if (OUTPUTS) load_vector(values + head.query, lane, head.keys, query[i]);
            const bool exists = lane < Own::BLOCK_COLUMNS && first + lane < head.values;
            value[i] = exists ? __ldcg(values + head.value + first + lane) : 0.0f;
            source.load(row[i], decay[i], beta[i]);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (base + i * groups + leader >= end) break;
            const unsigned token = base + i * groups + group;
            if (!SCAN) scale(key[i], reciprocal_root(sum_of_lanes(share(key[i], key[i])) + float(HOST_NORM_EPSILON)));
            float both = 0.0f;
            if (OUTPUTS) {
                if (!SCAN) {
                    const float root = reciprocal_root(sum_of_lanes(share(query[i], query[i])) + float(HOST_NORM_EPSILON));
                    scale(query[i], root * reciprocal_root(float(head.keys)));
                }
                both = sum_of_lanes(share(key[i], query[i]));
            }
            source.gates(row[i], decay[i], beta[i], token < end && lane == 0);
            if (token >= end) continue;
            float* record = records + (token - begin) * Own::RECORD;
#pragma unroll
            for (int part = 0; part < Own::PARTS; ++part) {
                *reinterpret_cast<float4*>(record + part * WIDTH + 4 * lane) = key[i][part];
                if (OUTPUTS) *reinterpret_cast<float4*>(record + Own::QUERY + part * WIDTH + 4 * lane) = query[i][part];
            }
            if (lane < Own::BLOCK_COLUMNS) record[Own::VALUES + lane] = value[i];
            if (lane == 0)
                *reinterpret_cast<float4*>(record + Own::SCALARS) = make_float4(decay[i], beta[i], both, source.skip);
        }
    }
}

// Puts out what a token gives, by the first lane of each group; `column` is an even number.
template <int SIZE>
__device__ __forceinline__ void put_out(
    const Head& head, unsigned row, unsigned column, const float (&outputs)[Sizes<SIZE>::COLUMNS]) {
    if (threadIdx.x % LANES != 0 || column >= head.values) return;
    float* target = head.outputs + size_t(row) * head.output_size + column;
    if constexpr (Sizes<SIZE>::COLUMNS == 2) *reinterpret_cast<float2*>(target) = make_float2(outputs[0], outputs[1]);
    else target[0] = outputs[0];
}

// The head's only token.
template <int SIZE, bool OUTPUTS, class Source>
__device__ __forceinline__ void walk_one(const Head& head, const Source& source, float* shared) {
    using Own = Sizes<SIZE>;
    const unsigned lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const bool walks = threadIdx.x < 32 * WALKERS;
    const unsigned column = blockIdx.x * Own::BLOCK_COLUMNS + group * Own::COLUMNS;
    Matrix<SIZE> matrix;
    if (walks) matrix.load(head.own_state, column, lane, head);
    else prepare<SIZE, OUTPUTS, 1>(head, source, 0, shared, group - WALKING_GROUPS, HELPING_GROUPS);
    __syncthreads();
    if (!walks) return;
    float outputs[Own::COLUMNS];
    matrix.template step<OUTPUTS>(Token<SIZE>(shared, group, lane), outputs);
    if (OUTPUTS) put_out<SIZE>(head, source.row(0), column, outputs);
    if (head.next_state != nullptr) matrix.store(head.next_state, column, lane, head);
}

// Walk through the head's tokens. `plan` (null: none) is that of a tree, whose tokens stand in its order.
template <int SIZE, bool OUTPUTS, class Source>
__device__ __forceinline__ void walk(const Head& head, const Source& source, const unsigned* plan, float* shared) {
    using Own = Sizes<SIZE>;
    constexpr int BATCH = SIZE > 128 ? 1 : 256 / SIZE;  // as many as registers hold
    const unsigned lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const bool walks = threadIdx.x < 32 * WALKERS;
    const unsigned column = blockIdx.x * Own::BLOCK_COLUMNS + group * Own::COLUMNS;
    float4* saved = reinterpret_cast<float4*>(shared + Own::READY);
    Matrix<SIZE> matrix;
    if (walks) matrix.load(head.own_state, column, lane, head);
    prepare<SIZE, OUTPUTS, BATCH>(head, source, 0, shared, group, THREADS / LANES);
    for (unsigned begin = 0, half = 0; begin < head.count; begin += Own::TOKENS, half ^= 1) {
        __syncthreads();
        const unsigned next = begin + Own::TOKENS;
        if (!walks) {
            float* records = shared + (half ^ 1) * Own::TOKENS * Own::RECORD;
            if (next < head.count)
                prepare<SIZE, OUTPUTS, BATCH>(head, source, next, records, group - WALKING_GROUPS, HELPING_GROUPS);
            continue;
        }
        const float* records = shared + half * Own::TOKENS * Own::RECORD;
        const unsigned count = min(unsigned(Own::TOKENS), head.count - begin);
        Token<SIZE> coming(records, group, lane);
#pragma unroll 2
        for (unsigned i = 0; i < count; ++i) {
            const Token<SIZE> token = coming;
            coming = Token<SIZE>(records + min(i + 1, count - 1) * Own::RECORD, group, lane);
            const unsigned entry = plan == nullptr ? 0 : plan[begin + i];
            if (restored(entry) != 0) matrix.restore(saved + (restored(entry) - 1) * (Own::SAVED / 4));
            float outputs[Own::COLUMNS];
            matrix.template step<OUTPUTS>(token, outputs);
            if (saves(entry) != 0) matrix.save(saved + (saves(entry) - 1) * (Own::SAVED / 4));
            if (OUTPUTS) put_out<SIZE>(head, source.row(begin + i), column, outputs);
        }
    }
    if (walks && head.next_state != nullptr) matrix.store(head.next_state, column, lane, head);
}

// The tokens of a step or of a chunk, whose gates were projected.
template <class Value> struct Projected {
    const char* values;     // of the step
    const unsigned* plan;   // of a tree, or null
    float* kept;            // of the sequence, or null: by one block of a head alone
    size_t first_row;
    unsigned columns, first, heads, head;
    float rate, bias, skip;

    __device__ __forceinline__ unsigned row(unsigned token) const { return plan == nullptr ? token : node_of(plan[token]); }
    __device__ __forceinline__ void load(unsigned row, float& decay, float& beta) const {
        const size_t place = (first_row + row) * columns + first + head;
        beta = loaded<Value>(values, place);
        decay = SCAN ? beta : loaded<Value>(values, place + heads);
    }
    __device__ __forceinline__ void gates(unsigned row, float& decay, float& beta, bool keeps) const {
        const float size = portable_softplus(decay + bias), logarithm = rate * size;
        beta = SCAN ? size : portable_sigmoid(beta);
        decay = portable_exp(logarithm);
        if (keeps && kept != nullptr) {
            kept[row * 2 * heads + head] = logarithm;
            kept[row * 2 * heads + heads + head] = beta;
        }
    }
};

// Where a head's query, key and value begin in a row: queries, keys and values, or of a scan x, B and C.
struct Parts {
    unsigned query, key, value;
};

__device__ __forceinline__ Parts parts_of(
    unsigned head, unsigned key_head, unsigned groups, unsigned keys, unsigned heads, unsigned values) {
    if (SCAN) return {heads * values + (groups + key_head) * keys, heads * values + key_head * keys, head * values};
    return {key_head * keys, (groups + key_head) * keys, 2 * groups * keys + head * values};
}

// What a block of a step or a chunk works on: grid (blocks of columns, value heads, sequences).
__device__ __forceinline__ Head head_of(const Arguments& a) {
    const unsigned slot = blockIdx.z, own = blockIdx.y, groups = (a.R - a.G * a.E) / (2 * a.D);
    const Parts parts = parts_of(own, own / (a.G / groups), groups, a.D, a.G, a.E);
    const size_t first_row = size_t(slot) * a.T;
    return Head{
        a.rows + first_row * a.R,
        a.matrix + (size_t(slot) * a.G + own) * a.E * a.D,
        nullptr,
        a.output + first_row * a.O + own * a.E,
        a.R, parts.query, parts.key, parts.value, a.D, a.E, a.O, a.T};
}

// Zeros of a row of the output.
template <int SIZE> __device__ __forceinline__ void clear_row(const Head& head, unsigned row) {
    const unsigned first = blockIdx.x * Sizes<SIZE>::BLOCK_COLUMNS, lane = threadIdx.x % LANES;
    if (lane < Sizes<SIZE>::BLOCK_COLUMNS && first + lane < head.values)
        head.outputs[size_t(row) * head.output_size + first + lane] = 0.0f;
}

template <class Gates> __device__ __forceinline__ float skip_of(const Gates& gates, unsigned head) {
    if constexpr (SCAN) return __ldg(gates.skip + head);
    else return 0.0f;
}

template <class Value> __device__ __forceinline__ Projected<Value> projected_of(const Arguments& a) {
    const unsigned own = blockIdx.y;
    return {a.projected, nullptr, nullptr, size_t(blockIdx.z) * a.T, a.V, unsigned(a.gates.first), a.G, own,
            -portable_exp(__ldg(a.gates.a_log + own)), __ldg(a.gates.dt_bias + own), skip_of(a.gates, own)};
}

// Of a step that keeps: its gates, of one token of each sequence.
template <int SIZE, class Value>
__global__ void __launch_bounds__(THREADS, BLOCKS_OF_ONE) delta_token(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) float shared[];
    launch_next_kernel();
    const Head head = head_of(a);
    auto source = projected_of<Value>(a);
    if (blockIdx.x == 0) source.kept = a.kept + source.first_row * 2 * a.G;
    wait_for_previous_kernel();
    walk_one<SIZE, true>(head, source, shared);
}

// The same of several tokens: with `parents` a tree of up to MOST_NODES, else a chain.
template <int SIZE, class Value, bool TREE>
__global__ void __launch_bounds__(THREADS, BLOCKS) delta_nodes(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) float shared[];
    __shared__ TreePlan plan;
    launch_next_kernel();
    Head head = head_of(a);
    auto source = projected_of<Value>(a);
    if (blockIdx.x == 0) source.kept = a.kept + source.first_row * 2 * a.G;
    wait_for_previous_kernel();
    if (TREE) {
        head.count = plan.make(a.parents + source.first_row, a.T);
        source.plan = plan.steps;
        if (head.count < a.T) {
            for (unsigned node = threadIdx.x / LANES; node < a.T; node += THREADS / LANES) {
                if (plan.is_below_root(node)) continue;
                clear_row<SIZE>(head, node);
                if (threadIdx.x % LANES != 0) continue;
                float decay, beta;
                source.load(node, decay, beta);
                source.gates(node, decay, beta, true);
            }
        }
    }
    walk<SIZE, true>(head, source, source.plan, shared);
}

// Of a chunk, of which the tokens that count change the state.
template <int SIZE, class Value>
__global__ void __launch_bounds__(THREADS, BLOCKS) delta_chunk(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) float shared[];
    launch_next_kernel();
    Head head = head_of(a);
    const auto source = projected_of<Value>(a);
    wait_for_previous_kernel();
    head.next_state = a.matrix + (head.own_state - a.matrix);
    head.count = min(max(__ldcg(a.state_tokens + blockIdx.z), 0), int(a.T));
    for (unsigned row = head.count + threadIdx.x / LANES; row < a.T; row += THREADS / LANES) clear_row<SIZE>(head, row);
    if (head.count > 0) walk<SIZE, true>(head, source, nullptr, shared);
}

// The matrices, rows and kept gates of layers of one shape.
struct CommitMatrices {
    const int *indices, *counts;
    unsigned batch, tokens, most, row_size, heads, values, keys;
    float* matrices[HOST_MOST_LAYERS];
    const float *rows[HOST_MOST_LAYERS], *gates[HOST_MOST_LAYERS];
};
static_assert(sizeof(CommitMatrices) == HOST_COMMIT_MATRICES_BYTES, "as the host's structure");

// Accepted nodes, whose gates were kept.
struct Kept {
    const float* kept;  // of the sequence
    const int* path;
    unsigned heads, head, tokens;
    static constexpr float skip = 0.0f;  // nothing is put out

    __device__ __forceinline__ unsigned row(unsigned token) const {
        return min(max(__ldcg(path + token), 0), int(tokens) - 1);
    }
    __device__ __forceinline__ void load(unsigned row, float& decay, float& beta) const {
        decay = __ldcg(kept + row * 2 * heads + head);
        beta = __ldcg(kept + row * 2 * heads + heads + head);
    }
    __device__ __forceinline__ void gates(unsigned, float& decay, float&, bool) const { decay = portable_exp(decay); }
};

// Grid: blocks of columns, value heads, sequences of all layers. ONE: there is one accepted token at most.
template <int SIZE, bool ONE>
__global__ void __launch_bounds__(THREADS, ONE ? BLOCKS_OF_COMMIT : BLOCKS) commit_matrices(const __grid_constant__ CommitMatrices a) {
    extern __shared__ __align__(16) float shared[];
    const unsigned slot = blockIdx.z % a.batch, layer = blockIdx.z / a.batch, own = blockIdx.y;
    launch_next_kernel();
    wait_for_previous_kernel();
    const int count = min(max(__ldcg(a.counts + slot), 0), int(a.most));
    if (count == 0) return;
    const unsigned groups = (a.row_size - a.heads * a.values) / (2 * a.keys);
    const Parts parts = parts_of(own, own / (a.heads / groups), groups, a.keys, a.heads, a.values);
    const size_t first_row = size_t(slot) * a.tokens;
    float* state = a.matrices[layer] + (size_t(slot) * a.heads + own) * a.values * a.keys;
    const Head head{
        a.rows[layer] + first_row * a.row_size, state, state, nullptr, a.row_size, parts.query,
        parts.key, parts.value, a.keys, a.values, 0, unsigned(count)};
    const Kept source{a.gates[layer] + first_row * 2 * a.heads, a.indices + size_t(slot) * a.most, a.heads, own, a.tokens};
    if constexpr (ONE) walk_one<SIZE, false>(head, source, shared);
    else walk<SIZE, false>(head, source, nullptr, shared);
}

}  // namespace recurrent
