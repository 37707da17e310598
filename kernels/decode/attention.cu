// Attention of the new tokens of each sequence, one in a decode step, up to 64 that form a tree in a verify step: q/k norm
// and rotary embedding, their KV rows written, and softmax attention of their query heads over the committed rows and
// the new tokens that they see, on tensor cores (flash-decoding, Dao et al. 2023).
//
// The keys of a token are counted as if the new ones that it sees stood right behind the committed rows, as they do once
// they are accepted. Tiles of 64 keys make spans, four spans a group, and where they begin depends on the number of the
// token's keys alone: a token gets the same bits in every batch, in every tree, and in the decode step that comes to it
// later. In a draft step, whose mask speaks of all rows (the nodes of earlier levels stand among them), every row counts
// as a key, and the mask decides at each.
//
// The 16 rows of an instruction are tokens times the query heads of one key-value head. Four warps, a team, compute a tile
// for them: each the scores of 16 keys, then a quarter of the head. Where new keys stand, each token has keys of its own:
// those 16 are then multiplied once for every token, whose rows alone are kept.
#include "decode/attention_heads.cuh"
#include "decode/attention_parts.cuh"
#include "decode/attention_tile.cuh"

namespace decode {
namespace keys_by_position {

// STEPS: of 16 head elements (head size up to 16 * STEPS). Grid (groups of spans, key-value heads, sequences times
// token_blocks of row_tiles * tile_tokens tokens). Block: 1, 2 or 4 teams; of its spans `slots` (1, 2 or 4) are computed at
// once, and `stages` (1 or 2) tiles of each are in memory. tile_tokens: those whose `group` heads are 16 rows or fewer;
// group_inverse: 65536 / group, rounded up. scale: of scores, times log2(e). rotary: columns of cos_sin that a head's first
// elements are rotated by; 0: none. offset is added to the norms' weights. mask [tokens of all sequences, keys]; null:
// tokens is 1. masks_all: the mask speaks of all rows, not of the new ones alone. partial [tokens of all sequences, query
// heads, states, size + 4].
template <typename T, int STEPS>
__global__ void __launch_bounds__(MAX_TEAMS * TEAM * 32) attention(const __grid_constant__ Arguments<T> arguments) {
    constexpr int PAIRS = STEPS / 4;
    extern __shared__ __align__(16) char shared[];
    __shared__ Tables tables;
    Block<T> block{arguments};
    block.find_place(shared, tables);
    launch_next_kernel();
    block.find_keys();
    if (block.split >= block.blocks) {
        wait_for_previous_kernel();
        return;
    }
    load_tiles<T, STEPS>(block, 0, 0, block.least);

    // Columns behind the heads' and rows of no token are zeros.
#pragma unroll 1
    for (int i = threadIdx.x; i < (2 * block.tokens + block.row_tiles * ROWS) * block.stride / 8; i += blockDim.x)
        reinterpret_cast<uint4*>(block.new_keys)[i] = make_uint4(0u, 0u, 0u, 0u);
    list_keys(block);
    // Where positions are new, the block needs all new keys. The one that has the first of them writes its tokens' rows.
    const int rows_of_tiles = GROUP * KEY_TILE * block.least, behind = (block.split + 1) * rows_of_tiles;
    const int new_keys = (block.split + 1) * GROUP * KEY_TILE * block.most > block.start ? block.tokens : 0;
    list_heads(block, new_keys, behind - rows_of_tiles <= block.start && block.start < behind);
    __syncthreads();

    wait_for_previous_kernel();
    if (block.q_norm != nullptr) {
        compute_norms(block, new_keys + block.row_tiles * ROWS);
        __syncthreads();
    }
    make_heads_ready(block, new_keys);
    __syncthreads();

#pragma unroll 1
    for (int each = block.least; each <= block.most; ++each) {
        compute_spans<T, STEPS>(block, each, each == block.least);
        merge_spans<T, PAIRS>(block, each);
        __syncthreads();
    }
    if (block.blocks == 1) return;

    if (threadIdx.x == 0) {  // behind a barrier of the block: the fences speak for all of its threads
        __threadfence();
        // Wraps to 0, ready for the next layer.
        const unsigned last = block.blocks - 1;
        tables.is_last_block = atomicInc(block.counters + blockIdx.z * block.kv_heads + block.kv_head, last) == last;
        __threadfence();
    }
    __syncthreads();
    if (tables.is_last_block) merge_blocks<T, PAIRS>(block);
}

}  // namespace keys_by_position
}  // namespace decode
