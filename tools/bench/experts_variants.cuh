// What `experts_variants.py` tries beside the functions of experts/packed_rows.cu, in front of which it stands.

// Asks the second-level cache for the block's part of its expert's downs, at `addition.outputs`, `addition.width` bytes of each.
__device__ __forceinline__ void ask_for_downs(const experts::Product& given) {
    const int expert = min(max(__ldcg(given.expert_ids + blockIdx.y), 0), given.experts - 1), bytes = given.addition.width;
    const int part = (bytes / (gridDim.x * SLICES) + 15) / 16 * 16, first = (blockIdx.x * SLICES + threadIdx.x / 32) * part;
    const char* begin = reinterpret_cast<const char*>(given.addition.outputs) + static_cast<size_t>(expert) * bytes + first;
    if (threadIdx.x % 32 == 0 && first < bytes)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin), "r"(min(part, bytes - first)) : "memory");
}

// The 16 columns of the block, of up to eight experts without biases, whose weights are all under way at once: a warp's share of
// K is one block of them. The residual is of T, and there is no shared expert.
template <typename T, typename G> __device__ __forceinline__ void multiply_row(const experts::Product& given, char* shared) {
    constexpr int EACH = experts::MOST / G::TEAMS;
    static_assert(G::PASS == experts::MOST && G::WEIGHT_TILES == 1 && G::DEPTH == EACH, "all experts' sums are added at once");
    const Linear linear = given.linear;
    const experts::Addition addition = given.addition;
    const int share = threadIdx.x / 32 % G::SHARING, team = team_of_warp<G>(), chosen = addition.chosen, steps = linear.steps;
    const int blocks = (linear.columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS, row_bytes = blocks * G::BLOCK_BYTES;
    const int lane = threadIdx.x % 32, tail = lane % G::PIECES * 16 + G::TAIL_BEGIN;
    const unsigned ring = shared_address(shared) + threadIdx.x / 32 * EACH * G::SLOT_BYTES;
    const char* begin = static_cast<const char*>(linear.weight) + static_cast<size_t>(blockIdx.x) * 2 * row_bytes + share * G::BLOCK_BYTES;
    int ids[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) ids[e] = __ldcg(given.expert_ids + min(team + e * G::TEAMS, chosen - 1));
    const auto copy = [&] {
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const char* own = begin + min(max(ids[e], 0), given.experts - 1) * given.stride;
            const unsigned slot = ring + e * G::SLOT_BYTES;
            const bool exists = share < blocks && team + e * G::TEAMS < chosen;
#pragma unroll
            for (int i = 0; i < 2; ++i) copy_async_16(slot + i * G::BLOCK_BYTES + lane * 16, own + i * row_bytes + lane * 16, exists);
            if (lane < 2 * G::PIECES)
                copy_async_16(slot + lane / G::PIECES * G::BLOCK_BYTES + tail, own + lane / G::PIECES * row_bytes + tail, exists);
        }
        commit_copies();
    };
    copy();
    wait_for_previous_kernel();
    int surely[EACH];  // what was chosen, where it was read while gates and ups chose
#pragma unroll
    for (int e = 0; HOST_ROUTES && e < EACH; ++e) surely[e] = __ldcg(given.expert_ids + min(team + e * G::TEAMS, chosen - 1));
    char* activations = shared + G::BEHIND;
    float *area = reinterpret_cast<float*>(shared + G::AREAS_BEGIN), *products = area + G::AREA;
    const int chunks = SLICES * steps * 4;  // of a row
#pragma unroll 2
    for (int i = threadIdx.x; i < chosen * chunks; i += decode::THREADS) {
        const int row = i / chunks, chunk = i % chunks;
        uint4 packed = make_uint4(0, 0, 0, 0);
        if (chunk * 8 < linear.columns)
            packed = __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(given.input) + row * linear.columns + chunk * 8));
        *reinterpret_cast<uint4*>(activations + ((chunk / 4 * chosen + row) * 4 + chunk % 4) * 16) = packed;
    }
    const int number = threadIdx.x / 16, column = threadIdx.x % 16, place = blockIdx.x * 16 + column;
    float weight = 0.f, before = 0.f;
    if (number < chosen) weight = __ldcg(addition.weights + number);
    if (number == 0) before = decode::to_float(static_cast<const T*>(addition.residual)[place]);
    wait_for_copies<0>();
    if (HOST_ROUTES) {
        bool is_other = false;  // the same for all lanes of a warp
#pragma unroll
        for (int e = 0; e < EACH; ++e) is_other |= surely[e] != ids[e], ids[e] = surely[e];
        if (is_other) {
            __syncwarp();
            copy();
            wait_for_copies<0>();
        }
    }
    __syncthreads();
    const int step_bytes = chosen * 64;
    const unsigned own = shared_address(activations) + share * BLOCK_STEPS * step_bytes + own_quad() * 16;
    const unsigned mask = given.pairs > 0 ? LOW : 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int number = team + e * G::TEAMS;
        if (number >= chosen) break;
        float sums[4] = {}, *left = area + share * G::TEAMS * G::OF_SLICE + number * G::TILE + own_quad() * 2 * G::STRIDE + own_row();
        Sixteen<G> held;
#pragma unroll
        for (int i = 0; i < 2; ++i) held.eight[i].read(SharedBlock{ring + e * G::SLOT_BYTES + i * G::BLOCK_BYTES});
        Group<T, G::MODE> groups[2];
        int steps_left = steps;
#pragma unroll
        for (int d = 0; d < BLOCK_STEPS; ++d) {
            const uint4 x = read_shared_16(own + number * 64 + d * step_bytes);
            unsigned low[4], high[4];
            held.eight[0].begin(groups[0], d, mask), held.eight[1].begin(groups[1], d, mask);
            held.eight[0].values(groups[0], d, mask, low);
            held.eight[1].values(groups[1], d, mask, high);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned a0[2] = {low[2 * half], high[2 * half]}, a2[2] = {low[2 * half + 1], high[2 * half + 1]};
                multiply_add(sums, a0, a2, half == 0 ? x.x : x.z, half == 0 ? x.y : x.w, T());
            }
            if ((d + 1) % G::EVERY != 0 || (steps_left -= G::EVERY) > 0) continue;
            leave_slice<G>(left, sums, 1);
            steps_left = steps, left += G::OF_SLICE;
        }
    }
    __syncthreads();
    if (number < chosen) {
        float sum = 0.f;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            float group = 0.f;
#pragma unroll
            for (int i = 0; i < SLICES_OF_A_GROUP; ++i) group += area[(g * SLICES_OF_A_GROUP + i) * G::OF_SLICE + number * G::TILE + column];
            sum += group;
        }
        products[threadIdx.x] = sum, products[16 * experts::MOST + threadIdx.x] = weight;
    }
    __syncthreads();
    if (threadIdx.x >= 16) return;
    float total = 0.f;
    for (int n = 0; n < chosen; ++n) total = fmaf(products[16 * (experts::MOST + n) + column], products[n * 16 + column], total);
    addition.output[place] = fmaf(addition.scale, total, before);
}
