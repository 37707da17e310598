// Codes of weights in blocks, as GGUF files have them, in a byte each: see block_codes.py, which says where a block has them.

// blocks: of HOST_SIZE bytes, each HOST_COLUMNS columns of a row, one behind another; codes: as many columns of each.
struct Unblock {
    const unsigned char* blocks;
    unsigned char* codes;
    long long eights;  // neighbouring columns
};
static_assert(sizeof(Unblock) == HOST_UNBLOCK_BYTES, "as the host's structure");

// A thread makes eight neighbouring columns, which a block has whole.
__global__ void unblock(const Unblock arguments) {
    const long long number = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (number >= arguments.eights) return;
    constexpr int EIGHTS = HOST_COLUMNS / 8;
    constexpr int SPAN = HOST_SPAN > 0 ? HOST_SPAN : 8, UPPER = HOST_UPPER > 0 ? HOST_UPPER : 1, LANES = HOST_LANES > 0 ? HOST_LANES : 1;
    const unsigned char* block = arguments.blocks + number / EIGHTS * HOST_SIZE;
    const int first = static_cast<int>(number % EIGHTS) * 8;
    unsigned words[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int column = first + i;
        unsigned code;
        if constexpr (HOST_SPAN == 0) {
            code = block[HOST_LOW + column] ^ 128u;
        } else {
            const int half = column / SPAN;  // two spans lie in as many bytes as one has columns
            code = block[HOST_LOW + half / 2 * SPAN + column % SPAN] >> half % 2 * 4 & 15;
        }
        if constexpr (HOST_UPPER > 0) {
            const int place = column / LANES;
            code |= (block[HOST_HIGH + place / (8 / UPPER) * LANES + column % LANES] >> place % (8 / UPPER) * UPPER & (1 << UPPER) - 1) << 4;
        }
        if (HOST_SIGNED_ZERO && code == 8) code = 0;
        words[i / 4] |= code << i % 4 * 8;
    }
    reinterpret_cast<uint2*>(arguments.codes)[number] = make_uint2(words[0], words[1]);
}
