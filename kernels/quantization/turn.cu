// Words of codes as published, turned so that each row's lie side by side: a word has neighbouring columns, the lowest bits
// first, as shuffle.cu reads them.

constexpr unsigned AWQ_PLACES[8] = {HOST_AWQ_PLACES};  // in a word, of eight neighbouring rows' codes of 4 bits
constexpr int SIDE = 32;

// target [rows, width] words. Of words [width, rows], a word of each row behind another; or, AWQ, [8 width, rows / 8], a word
// of eight rows and one column.
struct Turn {
    const unsigned* words;
    unsigned* target;
    int rows, width;
};
static_assert(sizeof(Turn) == HOST_TURN_BYTES, "as the host's structure");

// Grid (ceil(rows / 64), ceil(width / 32)), 256 threads: a block makes 32 words of 64 rows.
template <bool AWQ> __global__ void turn(const Turn arguments) {
    __shared__ unsigned tile[2 * SIDE][SIDE + 1];
    const int rows = arguments.rows, width = arguments.width, first_row = blockIdx.x * 2 * SIDE, first = blockIdx.y * SIDE;
    if (AWQ) {
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
            const long long own = static_cast<long long>(first + word) * rows + first_row + row;
            tile[row][word] = exists ? arguments.words[own] : 0;
        }
    }
    __syncthreads();
    for (int place = threadIdx.x; place < 2 * SIDE * SIDE; place += 256) {
        const int word = place % SIDE, row = place / SIDE;
        if (first_row + row < rows && first + word < width)
            arguments.target[static_cast<long long>(first_row + row) * width + first + word] = tile[row][word];
    }
}
