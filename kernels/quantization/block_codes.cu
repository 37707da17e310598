// Codes of weights in blocks, as GGUF files have them, in a byte each, and their levels as blocks of the kernels' layout have them:
// see block_codes.py, which says where a block has them.

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

#if HOST_LEVEL_PARTS > 0
// blocks: of `rows` rows, each of `along` times 128 columns; tails [row blocks, along, TAIL_BYTES], of which they are the rows
// from the `first` on. Behind them rows up to the `end`-th become zeros.
struct Levels {
    const unsigned char* blocks;
    unsigned char* tails;
    int rows, along, first, end;
};
static_assert(sizeof(Levels) == HOST_LEVELS_BYTES, "as the host's structure");

// The number of a block's group, and part: a scale, or a minimum.
__device__ __forceinline__ int level(const unsigned char* block, int group, int part) {
    if constexpr (HOST_COLUMNS / HOST_GROUP == 16) {  // two's complements behind the codes
        return static_cast<signed char>(block[192 + group]);
    } else if constexpr (HOST_LEVEL_PARTS == 2) {  // 6 bits: see `_of_eight` of gguf_blocks.py
        const int own = block[4 + part * 4 + group % 4];
        return group < 4 ? own & 63 : block[12 + group % 4] >> part * 4 & 15 | own >> 6 << 4;
    } else {  // 4 bits, and 2 before them
        const int upper = (block[2] | block[3] << 8) >> group * 2 & 3;
        return (block[4 + group / 2] >> group % 2 * 4 & 15 | upper << 4) - 32;
    }
}

// A thread makes what a row has of 128 columns: see `Levels` of device_layout.py.
__global__ void levels(const Levels arguments) {
    constexpr int SCALES = 128 / HOST_GROUP, PARTS = HOST_LEVEL_PARTS, HALVES = SCALES / 4;
    constexpr int TAIL_BYTES = 8 * (2 + SCALES) * PARTS, OF_BLOCK = HOST_COLUMNS / 128;
    const int number = blockIdx.x * blockDim.x + threadIdx.x, row = number / arguments.along, own = number % arguments.along;
    if (arguments.first + row >= arguments.end) return;
    const int target = arguments.first + row;
    unsigned char* tail = arguments.tails + (static_cast<long long>(target / 8) * arguments.along + own) * TAIL_BYTES;
    const unsigned char* block = arguments.blocks + (static_cast<long long>(row) * arguments.along + own) / OF_BLOCK * HOST_SIZE;
    const bool exists = row < arguments.rows;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        unsigned char* factor = tail + (target % 8 * PARTS + part) * 2;
        factor[0] = exists ? block[HOST_FACTORS + part * 2] : 0;
        factor[1] = exists ? block[HOST_FACTORS + part * 2 + 1] ^ part * 0x80 : 0;  // minima are taken off
        for (int i = 0; i < SCALES; ++i) {
            const int half = i % HALVES, place = 16 * PARTS + ((target % 8 * HALVES + half) * PARTS + part) * 4 + i / HALVES;
            tail[place] = exists ? level(block, own % OF_BLOCK * SCALES + i, part) + 128 : 0;
        }
    }
}
#endif
