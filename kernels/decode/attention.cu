// Attention of the new tokens of each sequence, one in a decode step, up to 64 that form a tree in a verify step: q/k norm
// and rotary embedding, their KV rows written, and softmax attention of their query heads over the committed rows and
// the new tokens that they see, on tensor cores (flash-decoding, Dao et al. 2023).
//
// The keys of a token are counted as if the new ones that it sees stood right behind the committed rows, as they do once
// they are accepted. Tiles of 64 keys make spans, whose states are merged one after the other, and where they begin
// depends on the number of the token's keys alone: a token gets the same bits in every batch, in every tree, and in the
// decode step that comes to it later. In a draft step, whose mask speaks of all rows (the nodes of earlier levels stand
// among them), every row counts as a key, and the mask decides at each.
//
// The 16 rows of an instruction are tokens times the query heads of one key-value head. A warp computes tiles for them by
// itself: scores, weights and weighted values stay in its registers. Or four warps share a tile: each has the scores of 16
// keys, which it tells the others, and the weighted values of a quarter of the columns. Scores of new keys are computed once
// for all tokens and then put where each token has the key; values of new keys are multiplied for each token by itself. Where
// each sequence has one new token, its key and value are read as if they stood in their tile.
#include "decode/attention_heads.cuh"
#include "decode/attention_states.cuh"
#include "decode/attention_tile.cuh"

namespace decode {
namespace keys_by_position {

// STEPS: of 16 head elements, the last of 8 or 16. SHARES: several warps have spans of a row. Grid (2^split_bits blocks that
// share the spans, times the parts of a head; key-value heads; sequences times token_blocks of row_tiles * tile_tokens
// tokens). Block: TILE_WARPS warps for each of row_tiles in each of 2^slot_bits spans that are computed at once, whose tiles
// have `stages` (1 to 3) places in memory.
// tile_tokens: those whose `group` heads are 16 rows or fewer; group_inverse, tile_inverse: 65536 / group and / tile_tokens,
// rounded up; inverse_size: 1 / size. scale: of scores, times log2(e). rotary: columns of cos_sin that a head's first
// elements are rotated by, a multiple of 4; 0: none. offset is added to the norms' weights. mask [tokens of all sequences,
// keys]; null: tokens is 1. masks_all: the mask speaks of all rows, not of the new ones alone. in_cluster: the blocks that
// share the spans are a cluster, else they leave states in partial [tokens of all sequences, query heads, states, size + 4].
template <typename T, int STEPS, bool SHARES>
__global__ void __launch_bounds__(HOST_MAX_WARPS * 32) attention(const __grid_constant__ Arguments<T> arguments) {
    extern __shared__ __align__(16) char shared[];
    __shared__ Tables tables;
    Block<T, STEPS> block{arguments};
    block.find_place(shared, tables);
    if (block.in_cluster) arrive_at_cluster<false>();  // before anyone writes to another's memory, all must have begun
    if (!NEXT_LATE) launch_next_kernel();
    block.find_keys();
    if (block.split >= block.active) {
        wait_for_previous_kernel();
        return;
    }
    const bool has_new = block.division_of(block.least).has_new || block.division_of(block.most).has_new;
    const bool is_clustered = block.in_cluster && block.active > 1;
    // Whether a warp copies the tiles that it computes, and no others.
    const bool alone = INT8 && TILE_WARPS == 1 && block.row_tiles == 1;
    auto wait_for_block = [](bool is_alone) {
        if (is_alone) __syncwarp();
        else __syncthreads();
    };
    bool is_ready = false;
#pragma unroll 1
    for (int bits = block.least; bits <= block.most; ++bits) {
        const Division division = block.division_of(bits);
        Whole<SHARES ? 0 : OWN_STEPS<STEPS>> whole;
        Chunk<STEPS> kept;
        Softmax softmax{};
        Rows rows;
        int loaded = 0, place = 0;  // rounds whose tiles are here or come, and the place in memory of the next
        auto next_of = [&](int stage) { return stage + 1 < block.stages ? stage + 1 : 0; };
        auto load = [&](int end) {
#pragma unroll 1
            for (; loaded < end; ++loaded, place = next_of(place)) load_tiles(block, division, loaded, place);
        };
#pragma unroll 1
        for (int round = 0, stage = 0; round < division.rounds; ++round, stage = next_of(stage)) {
            const bool fills = round == 0 || block.stages == 1;  // else the barrier below frees a place
            const bool was_ready = is_ready;
            if (fills && is_ready) wait_for_block(alone);
            if (fills && (is_ready || !IN_TURN)) load(round + block.stages);
            if (!is_ready) {
                NormWeights<STEPS> norms;
                read_norms(norms, block);
                list_keys(block);
                wait_for_previous_kernel();
                make_heads_ready<0>(block, norms, has_new);
                if (is_clustered) wait_for_cluster();
                is_ready = true;
                if constexpr (IN_TURN) {  // a tile comes where new keys are, and these part by part
                    __syncthreads();
                    if (has_new) compute_new_scores<0>(block);
                    if constexpr (Block<T, STEPS>::PARTS > 1) {
                        if (has_new) {
                            make_heads_ready<1>(block, norms, has_new);
                            __syncthreads();
                            compute_new_scores<1>(block);
                        }
                    }
                    load(round + block.stages);
                }
            }
            const int under_way = loaded - round - 1;
            if (under_way > 1) wait_for_copies<2>();
            else if (under_way > 0) wait_for_copies<1>();
            else wait_for_copies<0>();
            wait_for_block(alone && was_ready);
            load(round + block.stages);
            if (round == 0) rows = rows_of(block, division), clear(whole);
            compute_tile(whole, kept, softmax, block, rows, division, round, stage);
            if (NEXT_LATE) launch_next_kernel();
        }
        if constexpr (!SHARES) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (rows.length[half] > 0) write_row(block, whole, rows.row[half], half);
        }
    }
    if constexpr (SHARES) merge_shares(block);
}

}  // namespace keys_by_position
}  // namespace decode
