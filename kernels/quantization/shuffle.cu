// Brings weights of 4 bits into the layout that kernels read, on the device: see device_layout.py.

constexpr unsigned CODE_BITS[8] = {HOST_CODE_BITS};

// codes: of each row, which begins `stride` bytes behind the one before, BITS of 4 (the first column in a byte's low half) or
// 8 each; tails [row blocks, blocks, tail_bytes]; data [row blocks, blocks, 512 + tail_bytes]. A thread makes 16 bytes: grid
// (blocks, row blocks), 32 threads and as many as copy the tail. Behind the last row and column are zeros.
struct Shuffle {
    const unsigned char *codes, *tails;
    unsigned char* data;
    long long stride;
    int rows, columns, tail_bytes;
};
static_assert(sizeof(Shuffle) == HOST_SHUFFLE_BYTES, "as the host's structure");

template <int BITS> __global__ void shuffle(const Shuffle arguments) {
    const long long block = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned char* target = arguments.data + block * (512 + arguments.tail_bytes);
    const int lane = threadIdx.x;
    if (lane >= 32) {
        const int place = (lane - 32) * 16;
        *reinterpret_cast<uint4*>(target + 512 + place) =
            *reinterpret_cast<const uint4*>(arguments.tails + block * arguments.tail_bytes + place);
        return;
    }
    const int row = blockIdx.y * 8 + lane / 4, first = blockIdx.x * 128 + lane % 4 * 8;
    unsigned words[4] = {};
    if (row < arguments.rows)
        for (int step = 0; step < 4; ++step)
            for (int j = 0; j < 8; ++j) {
                const int column = first + step * 32 + j;
                if (column >= arguments.columns) continue;
                const unsigned byte = arguments.codes[row * arguments.stride + static_cast<long long>(column) * BITS / 8];
                const unsigned code = BITS == 8 ? byte & 15 : byte >> column % 2 * 4 & 15;
                const unsigned bit = CODE_BITS[j];
                words[step] |= code << bit | (bit > 28 ? code >> (32 - bit) : 0);
            }
    *reinterpret_cast<uint4*>(target + lane * 16) = make_uint4(words[0], words[1], words[2], words[3]);
}
