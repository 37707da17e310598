// Causal attention of many new tokens over a KV cache: tiles of 64 keys pass by a block's queries, whose sums stay in registers
// (Dao et al. 2022; Dao 2023), and each query has the bits of the decode step of its token, however the prompt is cut.
//
// So its keys are divided as there: by their number into spans of 2^bits tiles, or within a window of always as many. A span
// has its own online softmax, and the states of spans are merged in order. A tile or a span of which a query sees nothing
// changes none of its sums. Queries of a block differ in bits where their numbers of keys pass a power of two: tiles pass
// by once for each value, and what queries of others get then is not written.
#include "prefill/sums.cuh"

namespace prefill {

// Lets tiles pass by TILES of a warp's tiles of 16 queries, from number `first` on, for COLUMNS columns from `column` on and
// the rows whose spans have 2^bits tiles, where SPANS is bits > 0. `begins`: the block's queries are still on their way.
template <bool SPANS, int TILES, int COLUMNS, typename T, typename Its>
__device__ __forceinline__ void pass(const Block<T, Its>& block, int bits, int first, int column, bool begins) {
    const int row = block.warp_row + 16 * first;
    const bool works = block.exists && block.bits_of(block.warp_row) <= bits &&
                       block.bits_of(block.warp_row + 16 * Its::TILES - 1) >= bits;
    const float factor = static_cast<float>(block.arguments.scale * 1.4426950408889634);  // as decode's launcher rounds it
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
    auto load = [&](int tile) {
        block.template load_tile<0>(tile);
        if constexpr (Its::STAGES > 1) block.template load_tile<1>(tile);
        decode::commit_copies();
    };
    if (!begins) __syncthreads();  // no warp reads what the last pass brought
    load(block.first_tile);
#pragma unroll 1
    for (int tile = block.first_tile; tile < block.tiles; ++tile) {
        const unsigned keys = block.place_of(tile), values = keys + Its::BYTES * KEY_TILE;
        decode::wait_for_copies<0>();
        block.template expand_tile<0>(tile);
        if constexpr (Its::STAGES > 1) block.template expand_tile<1>(tile);
        __syncthreads();  // this tile is there, and what the one before had is free
        if constexpr (Its::STAGES > 1) {
            if (tile + 1 < block.tiles) load(tile + 1);
        } else {
            block.template load_tile<1>(tile);
            decode::commit_copies();
        }
        if (INT8 && begins && tile == block.first_tile)
            reorder_queries<Its::SIZE, 16 * Its::TILES>(block.queries + Its::BYTES * block.warp_row);
        const bool sees = works && tile >= block.warp_tile && tile * KEY_TILE < block.warp_end;
        const int of_span = tile & ((1 << bits) - 1);
        const bool is_first = !SPANS || of_span == 0 || tile == block.warp_tile;
        const bool is_last = !SPANS || of_span + 1 == 1 << bits || (tile + 1) * KEY_TILE >= block.warp_end;
        Scores<TILES> score;
        if (sees) {
            compute_scores<T, Its, TILES>(score, block.queries + Its::BYTES * row, keys);
            finish_scores<T, Its, TILES>(score, block, row, tile);
        }
        if constexpr (Its::STAGES == 1) {
            decode::wait_for_copies<0>();
            block.template expand_tile<1>(tile);
            __syncthreads();  // values are there, and no warp reads the keys
            if (tile + 1 < block.tiles) load(tile + 1);
        }
        if (!sees) continue;
        Weights<TILES> weight;
        float total[TILES][4], correction[TILES][2];
        weigh_rows<0, T, Its, TILES>(weight, total, correction, sums, score, block, factor, tile, is_first);
        weigh_rows<1, T, Its, TILES>(weight, total, correction, sums, score, block, factor, tile, is_first);
        add_tile<T, Its>(sums, weight, total, correction, values, column, is_first, is_last);
    }
    if (works) write_results(sums, block, row, column, bits);
}

// Grid: query heads, sequences, blocks of queries, of which the last, which see most keys, begin first.
template <typename T, int SIZE, int TILES>
__global__ void __launch_bounds__(THREADS, (Shape<SIZE, TILES>::BLOCKS))
    causal_attention(const __grid_constant__ Arguments arguments, const Division division) {
    using Its = Shape<SIZE, TILES>;
    static_assert(Its::BYTES * (Its::ROWS + 2 * Its::STAGES * KEY_TILE) + (INT8 ? 8 * Its::STAGES * KEY_TILE : 0) == HOST_BYTES,
                  "shared memory as the host counts it");
    extern __shared__ __align__(128) char memory[];
    Block<T, Its> block{arguments, division};
    block.find_place(memory);
    const size_t token = static_cast<size_t>(block.sequence) * block.tokens + block.first_token;
    const T* const source = reinterpret_cast<const T*>(arguments.queries) + token * arguments.E + block.head * block.size;
    load_rows<T, SIZE, Its::ROWS>(block.queries, source, arguments.E, block.tokens - block.first_token, block.size, 0);
    const int least = block.bits_of(0), most = block.bits_of(Its::ROWS - 1);
    bool begins = true;
#pragma unroll 1
    for (int bits = least; bits <= most; ++bits) {
        if (bits == 0) {
            pass<false, TILES, SIZE>(block, bits, 0, 0, begins);
            begins = false;
            continue;
        }
#pragma unroll 1
        for (int first = 0; first < TILES; first += Its::PASS_TILES)
#pragma unroll 1
            for (int column = 0; column < block.size; column += Its::PASS_COLUMNS) {
                pass<true, Its::PASS_TILES, Its::PASS_COLUMNS>(block, bits, first, column, begins);
                begins = false;
            }
    }
}

}  // namespace prefill
