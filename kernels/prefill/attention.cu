// Causal attention of many new tokens over a KV cache: tiles of 64 keys pass by a block's queries, whose sums stay in registers
// (Dao et al. 2022; Dao 2023), and each query has the bits of the decode step of its token, however the prompt is cut.
//
// So its keys are divided as there: by their number into spans of 2^bits tiles, or within a window of always as many. A span
// has its own online softmax, and the states of spans are merged in order. A tile or a span of which a query sees nothing
// changes none of its sums. Queries of a warp differ in bits where their numbers of keys pass a power of two: tiles pass by
// once for each value, and what queries of the other get then is not written.
#include "prefill/sums.cuh"

namespace prefill {

// Lets tiles pass by TILES of a warp's tiles of 16 queries, from number `first` on, for COLUMNS columns from `column` on. Of
// the values of bits that the warp's queries have, number `turn` counts; without SPANS all queries of the block have 0.
// `begins`: the block's queries are still on their way.
template <bool SPANS, int TILES, int COLUMNS, typename T, typename Its>
__device__ __forceinline__ void pass(const Block<T, Its>& block, int turn, int first, int column, bool begins) {
    const int row = block.warp_row + 16 * first, bits = SPANS ? block.least_bits + turn : 0;
    const bool works = block.exists && bits <= block.most_bits;
    const float factor = static_cast<float>((CAP ? 1 : block.arguments.scale) * 1.4426950408889634);  // as decode's host does
    Sums<TILES, COLUMNS, SPANS> sums;
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sums.whole_maximum[m][half] = LOWEST, sums.whole_total[m][half] = 0.f;
            sums.maximum[m][half] = LOWEST, sums.total[m][half] = 0.f;
        }
    }
    clear(sums.whole);
    if constexpr (SPANS) clear(sums.sum);
    const unsigned queries = block.queries + Its::BYTES * row;
    const int lane = threadIdx.x % 32;
    auto sees = [&](int tile) { return works && tile >= block.warp_tile && tile * KEY_TILE < block.warp_end; };
    constexpr int PART_STEPS = Its::PART / 16;
    auto compute = [&](Scores<TILES>& score, int tile, int part) {
        const int own = decode::in_register(lane);  // places of matrices are found anew: registers are few
#pragma unroll
        for (int k = PART_STEPS * part; k < PART_STEPS * (part + 1); ++k) {
            unsigned query[TILES][4];
            load_queries<Its>(query, queries, own, k);
            add_step<T, Its>(score, query, block.place_of(tile), own, k);
        }
        if (part + 1 == Its::PARTS) make_scores(score, block, tile);
    };
    Weighed<TILES> weighed;
    auto weigh = [&](const Scores<TILES>& score, int tile, int n) {
        const float2 scale = INT8 ? block.template two_scales<1>(tile, n) : make_float2(1.f, 1.f);
        weigh_eight<T>(weighed, sums, score, factor, scale, n);
    };
    auto begin = [&](Scores<TILES>& score, int tile) {
        hide_scores(score, block, row, tile);
        const bool is_first = !SPANS || (tile & ((1 << bits) - 1)) == 0 || tile == block.warp_tile;
        begin_weights<0>(weighed, sums, score, factor, is_first), begin_weights<1>(weighed, sums, score, factor, is_first);
        return is_first;
    };
    auto add = [&](int tile, bool is_first) {
        const bool is_last = !SPANS || (tile + 1 & ((1 << bits) - 1)) == 0 || (tile + 1) * KEY_TILE >= block.warp_end;
        add_tile<T, Its>(sums, weighed, block.values_of(tile), Its::PARTS == 1 ? column : column % Its::PART, is_first,
                         is_last);
    };
    auto reorder = [&] {
        if (INT8 && begins) reorder_queries<Its::SIZE, 16 * Its::TILES>(block.queries + Its::BYTES * block.warp_row);
    };
    if (!begins) __syncthreads();  // no warp reads what the last pass brought
    block.template load_tile<0>(block.first_tile);
    if constexpr (Its::template EARLY<SPANS>) {
        decode::commit_copies();
        decode::wait_for_copies<0>();
        block.template expand_tile<0>(block.first_tile);
        __syncthreads();
        reorder();
        if (block.first_tile + 1 < block.tiles) block.template load_tile<0>(block.first_tile + 1);
        block.template load_tile<1>(block.first_tile);
        decode::commit_copies();
        Scores<TILES> score;
        if (works) compute(score, block.first_tile, 0);
#pragma unroll 1
        for (int tile = block.first_tile; tile < block.tiles; ++tile) {
            decode::wait_for_copies<0>();
            if (tile + 1 < block.tiles) block.template expand_tile<0>(tile + 1);
            block.template expand_tile<1>(tile);
            __syncthreads();  // the next keys and this tile's values are there, and what was before them is free
            if (tile + 2 < block.tiles) block.template load_tile<0>(tile + 2);
            if (tile + 1 < block.tiles) block.template load_tile<1>(tile + 1);
            decode::commit_copies();
            if (!sees(tile)) continue;
            const bool is_first = begin(score, tile);
            Scores<TILES> next;  // behind the last tile, of what lies there: nobody takes them
            const int own = decode::in_register(lane);
#pragma unroll
            for (int k = 0; k < Its::STEPS; ++k) {
                unsigned query[TILES][4];
                load_queries<Its>(query, queries, own, k);
                add_step<T, Its>(next, query, block.place_of(tile + 1), own, k);
#pragma unroll
                for (int n = 2 * BLOCKS * k / Its::STEPS; n < 2 * BLOCKS * (k + 1) / Its::STEPS; ++n) weigh(score, tile, n);
            }
            make_scores(next, block, tile + 1);
            add(tile, is_first);
#pragma unroll
            for (int m = 0; m < TILES; ++m)
#pragma unroll
                for (int n = 0; n < 2 * BLOCKS; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) score[m][n][i] = next[m][n][i];
        }
    } else {
        if constexpr (Its::STAGES > 1) block.template load_tile<1>(block.first_tile);
        decode::commit_copies();
#pragma unroll 1
        for (int tile = block.first_tile; tile < block.tiles; ++tile) {
            if constexpr (Its::PARTS > 1) {
                if (tile > block.first_tile) {
                    __syncthreads();  // no warp reads the values before
                    block.template load_tile<0>(tile);
                    decode::commit_copies();
                }
            }
            decode::wait_for_copies<0>();
            block.template expand_tile<0>(tile);
            if constexpr (Its::STAGES > 1) block.template expand_tile<1>(tile);
            __syncthreads();  // this tile is there, and what the one before had is free
            if constexpr (Its::STAGES > 1) {
                if (tile + 1 < block.tiles) block.template load_tile<0>(tile + 1), block.template load_tile<1>(tile + 1);
            } else if constexpr (Its::PARTS == 1) {
                block.template load_tile<1>(tile);
            }
            decode::commit_copies();
            if (tile == block.first_tile) reorder();
            Scores<TILES> score;
            if (sees(tile)) compute(score, tile, 0);
            if constexpr (Its::PARTS > 1) {
                __syncthreads();  // no warp reads the first half of the keys
                block.template load_tile<0>(tile, 1);
                decode::commit_copies();
                decode::wait_for_copies<0>();
                block.template expand_tile<0>(tile);
                __syncthreads();
                if (sees(tile)) compute(score, tile, 1);
                __syncthreads();
                block.template load_tile<1>(tile, column / Its::PART);
                decode::commit_copies();
            }
            if constexpr (Its::STAGES == 1) {
                decode::wait_for_copies<0>();
                block.template expand_tile<1>(tile);
                __syncthreads();  // values are there, and no warp reads the keys
                if (Its::PARTS == 1 && tile + 1 < block.tiles) block.template load_tile<0>(tile + 1);
                decode::commit_copies();
            }
            if (!sees(tile)) continue;
            const bool is_first = begin(score, tile);
#pragma unroll
            for (int n = 0; n < 2 * BLOCKS; ++n) weigh(score, tile, n);
            add(tile, is_first);
        }
    }
    if (works) write_results(sums, block, row, column, bits);
}

// Grid: query heads, sequences, blocks of queries, of which the last, which see most keys, begin first.
template <typename T, int SIZE, int TILES>
__global__ void __launch_bounds__(THREADS, (Shape<SIZE, TILES>::BLOCKS))
    causal_attention(const __grid_constant__ Arguments arguments, const Division division) {
    using Its = Shape<SIZE, TILES>;
    static_assert(Its::BYTES * Its::ROWS + Its::RING + (INT8 ? 8 * Its::STAGES * KEY_TILE : 0) == HOST_BYTES,
                  "shared memory as the host counts it");
    extern __shared__ __align__(128) char memory[];
    launch_next_kernel();
    wait_for_previous_kernel();
    Block<T, Its> block{arguments, division};
    block.find_place(memory);
    const size_t token = static_cast<size_t>(block.sequence) * block.tokens + block.first_token;
    const T* const source = reinterpret_cast<const T*>(arguments.queries) + token * arguments.E + block.head * block.size;
    load_rows<T, SIZE, Its::ROWS>(block.queries, source, arguments.E, block.tokens - block.first_token, block.size, 0);
    if (block.bits_of(Its::ROWS - 1) == 0) {
        if constexpr (Its::PARTS == 1) {
            pass<false, TILES, SIZE>(block, 0, 0, 0, true);
        } else {
#pragma unroll 1
            for (int column = 0; column < SIZE; column += Its::PART)
                pass<false, TILES, Its::PART>(block, 0, 0, column, column == 0);
        }
        return;
    }
    bool begins = true;
#pragma unroll 1
    for (int turn = 0; turn < block.turns; ++turn)
#pragma unroll 1
        for (int first = 0; first < TILES; first += Its::PASS_TILES)
#pragma unroll 1
            for (int column = 0; column < block.size; column += Its::PASS_COLUMNS) {
                pass<true, Its::PASS_TILES, Its::PASS_COLUMNS>(block, turn, first, column, begins);
                begins = false;
            }
}

}  // namespace prefill
