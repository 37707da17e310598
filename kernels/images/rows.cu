// Prompts with images: their rows instead of embeddings, and rotary rows from positions in time, height and width.
#include "images/arguments.cuh"
#include "shared/token_rows.cuh"

// One block a token. The n-th image token takes row first_row + n, if there is one; `inserted` counts those that do.
template <class Compute>
__global__ void insert_image_rows(InsertImageRowsArguments a) {
    unsigned token = blockIdx.x;
    size_t row_bytes = a.H * sizeof(Compute);
    if (a.token_ids[token] != a.image_token_id) return;
    long long row = a.first_row;
    for (unsigned base = 0; base < token; base += blockDim.x) {
        unsigned other = base + threadIdx.x;
        row += __syncthreads_count(other < token && a.token_ids[other] == a.image_token_id);
    }
    if (row < 0 || row >= a.M) return;
    if (threadIdx.x == 0) atomicAdd(a.inserted, 1);
    copy_bytes(a.target + token * row_bytes, a.image_rows + row * row_bytes, row_bytes);
}

// One block a token: column i is that of the row which the token's position along axes[i] names.
template <class Compute>
__global__ void mrope_rotary_rows(MropeRotaryRowsArguments a) {
    size_t token = blockIdx.x;
    Compute* target = reinterpret_cast<Compute*>(a.rope_rotary_cos_sin) + token * a.R;
    for (unsigned i = threadIdx.x; i < a.R; i += blockDim.x) {
        int axis = min(max(a.axes[i], 0), 2);
        size_t position = min(max(a.positions[axis * gridDim.x + token], 0), int(a.P) - 1);
        target[i] = Compute(a.rotary_table[position * a.R + i]);
    }
}
