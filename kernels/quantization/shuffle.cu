// Brings weights of 4 to 8 bits into the layout that kernels read, on the device: see device_layout.py.

// By how many bits the code of each column of a word is turned to the left, and its highest bit.
constexpr int TURNS[][2] = {HOST_TURNS};

// codes: of each row, which begins `stride` bytes behind the one before, STORED bits each: 4 (the first column in a byte's low
// half) or 8; tails [row blocks, blocks, tail_bytes]; data [row blocks, blocks, 128 (OWN + UPPER) + tail_bytes] of codes of OWN
// bits, and of UPPER bits more. A thread makes 16 bytes: grid (blocks, row blocks), 8 (OWN + UPPER) threads and as many as copy
// the tail. Behind the last row and column are zeros.
struct Shuffle {
    const unsigned char *codes, *tails;
    unsigned char* data;
    long long stride;
    int rows, columns, tail_bytes;
};
static_assert(sizeof(Shuffle) == HOST_SHUFFLE_BYTES, "as the host's structure");

__device__ __forceinline__ unsigned turned(unsigned word, int bits) { return __funnelshift_l(word, word, bits); }

template <int OWN, int STORED, int UPPER> __global__ void shuffle(const Shuffle arguments) {
    constexpr int LANES = 8 * OWN, ALL_LANES = LANES + 8 * UPPER, CODE_BYTES = 16 * ALL_LANES, COLUMNS = 32 / OWN, STEP_WORDS = OWN / 4, LOW = (1 << OWN - 1) - 1;
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
                    const unsigned code = arguments.codes[row * arguments.stride + column];
                    words[word] |= code >> OWN << (i / 2 * UPPER + i % 2 * 16);
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
                const unsigned code = STORED == 4 ? byte >> column % 2 * 4 & 15 : OWN == 4 ? byte & 15 : byte;
                words[word] |= turned(code & LOW, TURNS[j][0]) | turned(code & LOW + 1, TURNS[j][1]);
            }
    *reinterpret_cast<uint4*>(target + lane * 16) = make_uint4(words[0], words[1], words[2], words[3]);
}
