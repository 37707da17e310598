// Codes as published on their way to shuffle.cu: words are turned so that each row's lie side by side, a word of neighbouring
// columns, the lowest bits first; and columns are put into the order of their groups.

constexpr unsigned AWQ_PLACES[8] = {HOST_AWQ_PLACES};  // in a word, of eight neighbouring rows' codes of 4 bits
constexpr int SIDE = 32;

constexpr int COLUMNS = 0, AWQ = 1, PAIRS = 2;

// target [rows, width] words. Of words [width, rows], a word of each row behind another (COLUMNS); or [8 width, rows / 8], a
// word of eight rows and one column (AWQ); or bytes [rows / 2, 8 width] of two rows, the first one's code in the low half, as
// two's complements (PAIRS).
struct Turn {
    const unsigned* words;
    unsigned* target;
    int rows, width;
};
static_assert(sizeof(Turn) == HOST_TURN_BYTES, "as the host's structure");

// Grid (ceil(rows / 64), ceil(width / 32)), 256 threads: a block makes 32 words of 64 rows.
template <int HOW> __global__ void turn(const Turn arguments) {
    __shared__ unsigned tile[2 * SIDE][SIDE + 1];
    const int rows = arguments.rows, width = arguments.width, first_row = blockIdx.x * 2 * SIDE, first = blockIdx.y * SIDE;
    if (HOW == AWQ) {
        const int i = threadIdx.x % 8, word = threadIdx.x / 8;
        unsigned made[8] = {};
        if (first_row + 8 * i < rows && first + word < width)
            for (int j = 0; j < 8; ++j) {
                const long long column = static_cast<long long>(first + word) * 8 + j;
                const unsigned found = arguments.words[column * (rows / 8) + first_row / 8 + i];
                for (int row = 0; row < 8; ++row) made[row] |= (found >> 4 * AWQ_PLACES[row] & 15) << 4 * j;
            }
        for (int row = 0; row < 8; ++row) tile[8 * i + row][word] = made[row];
    } else {
        for (int place = threadIdx.x; place < 2 * SIDE * SIDE; place += 256) {
            const int row = place % (2 * SIDE), word = place / (2 * SIDE);
            const bool exists = first_row + row < rows && first + word < width;
            if (HOW == COLUMNS) {
                const long long own = static_cast<long long>(first + word) * rows + first_row + row;
                tile[row][word] = exists ? arguments.words[own] : 0;
                continue;
            }
            const long long own = (static_cast<long long>((first_row + row) / 2) * width + first + word) * 2;
            const unsigned two[2] = {exists ? arguments.words[own] : 0, exists ? arguments.words[own + 1] : 0};
            unsigned made = 0;
            for (int j = 0; j < 8; ++j) made |= (two[j / 4] >> (j % 4 * 8 + row % 2 * 4) & 15) << 4 * j;
            tile[row][word] = made ^ 0x88888888u;
        }
    }
    __syncthreads();
    for (int place = threadIdx.x; place < 2 * SIDE * SIDE; place += 256) {
        const int word = place % SIDE, row = place / SIDE;
        if (first_row + row < rows && first + word < width)
            arguments.target[static_cast<long long>(first_row + row) * width + first + word] = tile[row][word];
    }
}

// target [rows, row_bytes / 4] words: of column k codes' column order[k]. codes [rows, row_bytes].
struct Arrange {
    const unsigned char* codes;
    unsigned* target;
    const int* order;
    long long words;
    int columns, row_bytes;
};
static_assert(sizeof(Arrange) == HOST_ARRANGE_BYTES, "as the host's structure");

// Codes of BITS. A thread makes a word.
template <int BITS> __global__ void arrange(const Arrange arguments) {
    constexpr int EACH = 32 / BITS;
    const long long word = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (word >= arguments.words) return;
    const int width = arguments.row_bytes / 4, first = static_cast<int>(word % width) * EACH;
    const unsigned char* row = arguments.codes + word / width * arguments.row_bytes;
    unsigned made = 0;
    for (int j = 0; j < EACH; ++j) {
        if (first + j >= arguments.columns) break;
        const int column = arguments.order[first + j];
        const unsigned found = BITS == 8 ? row[column] : row[column / 2] >> column % 2 * 4 & 15;
        made |= found << BITS * j;
    }
    arguments.target[word] = made;
}
