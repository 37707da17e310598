// Brings weights of 4 to 8 bits into the layout that kernels read, on the device: see device_layout.py.

// Of each column of a word bits of its code, and by how many they are turned to the left; then others. code_words.py has them.
constexpr int TURNS[][4] = {HOST_TURNS}, UPPER_TURNS[][4] = {HOST_UPPER_TURNS};

// codes: of each row, which begins `stride` bytes behind the one before, STORED bits each: 4 (the first column in a byte's low
// half) or 8; tails [row blocks, blocks, tail_bytes]; data [row blocks, blocks, 128 (OWN + UPPER) + tail_bytes] of words that
// have OWN bits of a code, and of UPPER words of a lane that have others. A thread makes 16 bytes: grid (blocks, row blocks),
// 8 (OWN + UPPER) threads and as many as copy the tail. Behind the last row and column are zeros.
struct Shuffle {
    const unsigned char *codes, *tails;
    unsigned char* data;
    long long stride;
    int rows, columns, tail_bytes;
};
static_assert(sizeof(Shuffle) == HOST_SHUFFLE_BYTES, "as the host's structure");

__device__ __forceinline__ unsigned turned(unsigned code, const int (&turns)[4]) {
    const unsigned low = code & turns[0], high = code & turns[2];
    return __funnelshift_l(low, low, turns[1]) | __funnelshift_l(high, high, turns[3]);
}

template <int OWN, int STORED, int UPPER> __global__ void shuffle(const Shuffle arguments) {
    constexpr int LANES = 8 * OWN, ALL_LANES = LANES + 8 * UPPER, CODE_BYTES = 16 * ALL_LANES, COLUMNS = 32 / OWN, STEP_WORDS = OWN / 4;
    const long long block = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned char* target = arguments.data + block * (CODE_BYTES + arguments.tail_bytes);
    const int lane = threadIdx.x;
    if (lane >= ALL_LANES) {
        const int place = (lane - ALL_LANES) * 16;
        *reinterpret_cast<uint4*>(target + CODE_BYTES + place) =
            *reinterpret_cast<const uint4*>(arguments.tails + block * arguments.tail_bytes + place);
        return;
    }
    if constexpr (UPPER > 0) {
        if (lane >= LANES) {
            unsigned words[4] = {};
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                const int number = (lane - LANES) * 4 + word, own = number / UPPER, part = number % UPPER;
                const int row = blockIdx.y * 8 + own / 4, first = blockIdx.x * 128 + part * (128 / UPPER) + own % 4 * 8;
                if (row >= arguments.rows) continue;
#pragma unroll
                for (int i = 0; i < 32 / UPPER; ++i) {  // the columns of a word
                    const int column = first + i / 8 * 32 + i % 8;
                    if (column >= arguments.columns) continue;
                    words[word] |= turned(arguments.codes[row * arguments.stride + column], UPPER_TURNS[i]);
                }
            }
            *reinterpret_cast<uint4*>(target + lane * 16) = make_uint4(words[0], words[1], words[2], words[3]);
            return;
        }
    }
    // of 8 bits, the second 32 threads make columns 64 on
    const int row = blockIdx.y * 8 + lane % 32 / 4, first = blockIdx.x * 128 + lane / 32 * 64 + lane % 4 * 8;
    unsigned words[4] = {};
    if (row < arguments.rows)
#pragma unroll
        for (int word = 0; word < 4; ++word)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const int column = first + word / STEP_WORDS * 32 + word % STEP_WORDS * COLUMNS + j;
                if (column >= arguments.columns) continue;
                const unsigned byte = arguments.codes[row * arguments.stride + static_cast<long long>(column) * STORED / 8];
                words[word] |= turned(STORED == 4 ? byte >> column % 2 * 4 : byte, TURNS[j]);
            }
    *reinterpret_cast<uint4*>(target + lane * 16) = make_uint4(words[0], words[1], words[2], words[3]);
}
