// The linear layers between two attentions in one kernel: each row of the weights is on its way to shared memory long
// before the layer in front is done, so that memory is never idle between layers. For sm_90 and later.
//
// Every multiprocessor has one block, all of them at once. A warp copies the weights of the block's units of all layers,
// one behind the other, into a ring that fills shared memory. A layer's input is the output of the layer in front, of all
// blocks: a block that has written its units adds one to the layer's counter, a warp of every block waits for all of them.
// 16 warps multiply as those of linear.cu do, slice by slice of K, so that a row gets the same bits. They leave their
// sums to one more warp, which adds them, writes the output and tells the others.
#include "decode/linear_arguments.cuh"
#include "decode/outputs.cuh"

namespace decode {
namespace chain {

constexpr int MOST_LAYERS = HOST_CHAIN_LAYERS, MOST_SLOTS = HOST_CHAIN_SLOTS;
constexpr int LINE = 64;                              // bytes of a row in one step
// A slot of the ring: eight rows, of each so many chunks of 64 columns. The copy puts the 16 bytes of a chunk into other
// places by the chunk's number in the slot: so two neighbouring rows' lie in different banks.
constexpr int CHUNKS = HOST_SLOT_CHUNKS, CHUNK_BYTES = 128, CHUNK_COLUMNS = 64;
constexpr int SLOT_BYTES = TILE_ROWS * CHUNKS * CHUNK_BYTES;
static_assert(CHUNKS % 8 == 4, "two neighbouring rows lie in different banks");
constexpr int BUFFERS = 4;                            // of partial sums
constexpr int COPYING = WARPS, ADDING = WARPS + 1, WAITING = WARPS + 2;  // numbers of the warps that do not multiply
constexpr int ALL_THREADS = THREADS + 96;
static_assert(ALL_THREADS == HOST_CHAIN_THREADS, "the host launches as many");

enum Kind { NORM_LINEAR, NORM_GATE_UP, RESIDUAL };

struct Layer {
    union {
        NormLinear norm;
        LinearResidual residual;
    };
    int kind;
    __device__ const Linear& linear() const { return kind == RESIDUAL ? residual.linear : norm.linear; }
};

// A CUtensorMap of a weight as [rows, chunks, 64].
struct __align__(64) WeightMap {
    unsigned long long opaque[16];
};

// counters: of each layer the blocks that have written it, then the blocks that wait for nothing more; all zero before and
// after. steps: the most of a layer; norm_steps: of one that norms. slots: of the ring; early: those that are filled before
// the previous kernel is done; under_way: those whose copies run at once: more would only lengthen the queues in which
// everything else waits.
struct Chain {
    WeightMap weights[MOST_LAYERS];
    Layer layers[MOST_LAYERS];
    unsigned* counters;
    int count, slots, early, under_way, steps, norm_steps;
};
static_assert(sizeof(Chain) == HOST_CHAIN_BYTES, "as the host's structure");

// What norm_linear's kernels ask of a geometry: up to eight rows, and no copies of the thread's own but those of norms.
struct EightRows {
    static constexpr int HALVES = 1, STAGES = 1;
};

// Barriers in shared memory. Of the ring's slots: weights have come, weights were read. Of the buffers of partial sums the
// same. Of the layers: the input is there.
struct Barriers {
    unsigned long long full[MOST_SLOTS], empty[MOST_SLOTS], summed[BUFFERS], added[BUFFERS], ready[MOST_LAYERS];
};

// Shared memory: the ring; activations [WARPS, steps, batch, 64 bytes]; of every layer that norms its weights
// [WARPS, norm_steps, 32] and sums [8, SUM_STRIDE]; partial sums [BUFFERS, WARPS, partials]; barriers.
__device__ constexpr int activations_begin(int slots) { return slots * SLOT_BYTES; }
__device__ constexpr int norms_begin(int slots, int steps, int batch) {
    return activations_begin(slots) + WARPS * steps * batch * LINE;
}
__device__ constexpr int norm_bytes(int norm_steps) { return WARPS * norm_steps * LINE + 8 * SUM_STRIDE * 4; }
__device__ constexpr int partials(int batch) { return 2 * batch * TILE_ROWS + 2; }  // two more, against bank conflicts
__device__ constexpr int partials_begin(int slots, int steps, int norm_steps, int norms, int batch) {
    return norms_begin(slots, steps, batch) + norms * norm_bytes(norm_steps);
}
__device__ constexpr int barriers_begin(int slots, int steps, int norm_steps, int norms, int batch) {
    return partials_begin(slots, steps, norm_steps, norms, batch) + BUFFERS * WARPS * partials(batch) * 4;
}
static_assert(sizeof(Barriers) + barriers_begin(5, 3, 2, 2, 7) == HOST_CHAIN_SHARED_BYTES, "the host gives a block its shared memory");

__device__ __forceinline__ void set_up(unsigned long long& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(unsigned long long& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

__device__ __forceinline__ void arrive_and_expect(unsigned long long& barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                 : "memory");
}

// Returns when the barrier's phases of this parity are over.
__device__ __forceinline__ void wait_for(unsigned long long& barrier, unsigned parity) {
    unsigned over;
    do
        asm volatile(
            "{\n.reg .pred over;\nmbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\nselp.u32 %0, 1, 0, over;\n}"
            : "=r"(over)
            : "r"(shared_address(&barrier)), "r"(parity)
            : "memory");
    while (over == 0);
}

// The same for a warp, of which one lane waits: a barrier serves one lane after the other.
__device__ __forceinline__ void wait_as_warp(unsigned long long& barrier, unsigned parity) {
    if (threadIdx.x % 32 == 0) wait_for(barrier, parity);
    __syncwarp();
}

// Copies a slot's part of a weight, from a row and chunk on, to shared memory; the barrier counts its bytes when they come.
__device__ __forceinline__ void copy_slot(
    unsigned shared, const WeightMap& map, int row, int chunk, unsigned long long& barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            shared),
        "l"(&map), "r"(0), "r"(chunk), "r"(row), "r"(shared_address(&barrier))
        : "memory");
}

// A place in a ring, and which time it is used, even or odd.
struct Place {
    int slot;
    unsigned parity;
    __device__ __forceinline__ void advance(int slots) {
        if (++slot == slots) slot = 0, parity ^= 1;
    }
};

// A layer's work: its units of 8 rows (or gates and ups), block by block in turn where the layer in front ended. A tile of
// eight rows comes in pieces, each of which fills a slot.
struct Shape {
    int rows, columns, steps, tiles, units, first, pieces;

    // `begin`: the block that has the layer's first unit; becomes that of the next layer.
    __device__ __forceinline__ Shape(const Layer& layer, int& begin) {
        const Linear& linear = layer.linear();
        rows = linear.rows, columns = linear.columns, steps = linear.steps;
        tiles = layer.kind == NORM_GATE_UP ? 2 : 1;
        units = (rows + TILE_ROWS - 1) / TILE_ROWS;
        pieces = (columns + CHUNKS * CHUNK_COLUMNS - 1) / (CHUNKS * CHUNK_COLUMNS);
        const int blocks = gridDim.x, block = blockIdx.x;
        first = block >= begin ? block - begin : block - begin + blocks;
        begin = (begin + units) % blocks;
    }
    __device__ __forceinline__ int blocks() const { return min(units, static_cast<int>(gridDim.x)); }
};

// One thread: all weights of the block, of all layers.
__device__ __forceinline__ void copy_weights(const Chain& chain, Barriers& barriers, unsigned ring) {
    Place place{0, 0}, awaited{0, 0};
    int begin = 0, early = chain.early, ahead = 0;
#pragma unroll 1
    for (int l = 0; l < chain.count; ++l) {
        const Shape shape(chain.layers[l], begin);
#pragma unroll 1
        for (int unit = shape.first; unit < shape.units; unit += gridDim.x)
#pragma unroll 1
            for (int tile = 0; tile < shape.tiles; ++tile)
#pragma unroll 1
                for (int piece = 0; piece < shape.pieces; ++piece) {
                    if (early-- == 0) wait_for(barriers.ready[0], 0);
                    if (ahead++ >= chain.under_way) {
                        wait_for(barriers.full[awaited.slot], awaited.parity);
                        awaited.advance(chain.slots);
                    }
                    unsigned long long& full = barriers.full[place.slot];
                    wait_for(barriers.empty[place.slot], place.parity ^ 1);
                    arrive_and_expect(full, SLOT_BYTES);
                    copy_slot(ring + place.slot * SLOT_BYTES, chain.weights[l], unit * TILE_ROWS + tile * shape.rows,
                              piece * CHUNKS, full);
                    place.advance(chain.slots);
                }
    }
}

// A warp's slice of K of the block's units; the partial sums to the next buffers.
template <typename T, int TILES>
__device__ __forceinline__ void multiply_layer(
    const Shape& shape, Barriers& barriers, unsigned ring, int slots, Place& place, unsigned activations, float* partial,
    Place& buffer, int batch) {
    int read = -1;  // the slot that has been read, where nobody was told
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = own_row(), quad = own_quad();
    const int first = warp * shape.steps, end = min(first + shape.steps, shape.columns / 32);
    const unsigned own = ring + row * CHUNKS * CHUNK_BYTES;
#pragma unroll 1
    for (int unit = shape.first; unit < shape.units; unit += gridDim.x) {
        float sum[TILES][2] = {};
        if (warp == 0) wait_as_warp(barriers.added[buffer.slot], buffer.parity ^ 1);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll 1
            for (int piece = 0; piece < shape.pieces; ++piece) {
                if (warp == 0) wait_as_warp(barriers.full[place.slot], place.parity);
                wait_for_team<THREADS>(0);
                if (threadIdx.x == 0 && read >= 0) arrive(barriers.empty[read]);  // all warps are done with it
                read = place.slot;
                const int before = piece * 2 * CHUNKS, behind = min(end, before + 2 * CHUNKS);
                const unsigned weights = own + place.slot * SLOT_BYTES;
#pragma unroll 4
                for (int step = max(first, before); step < behind; ++step) {
                    uint4 a = make_uint4(0, 0, 0, 0);
                    if (row < batch) a = read_shared_16(activations + (step - first) * batch * LINE);
                    const int chunk = (step - before) / 2, sixteen = step % 2 * 4 + quad ^ (row % 2 * 4 + chunk) % 8;
                    const uint4 b = read_shared_16(weights + chunk * CHUNK_BYTES + sixteen * 16);
                    const unsigned x[1] = {a.x}, y[1] = {a.y}, z[1] = {a.z}, w[1] = {a.w};
                    multiply_add(sum[tile], x, y, b.x, b.y, T());
                    multiply_add(sum[tile], z, w, b.z, b.w, T());
                }
                place.advance(slots);
            }
        }
        float* mine = partial + (buffer.slot * WARPS + warp) * partials(batch) + row * TILE_ROWS + quad * 2;
        if (row < batch)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                *reinterpret_cast<float2*>(mine + tile * batch * TILE_ROWS) = make_float2(sum[tile][0], sum[tile][1]);
        wait_for_team<THREADS>(0);
        if (threadIdx.x == 0) {
            arrive(barriers.summed[buffer.slot]);
            arrive(barriers.empty[read]);
        }
        read = -1;
        buffer.advance(BUFFERS);
    }
}

// 16 warps: the input of each layer to shared memory, and its products.
template <typename T>
__device__ __forceinline__ void multiply(const Chain& chain, Barriers& barriers, char* shared, float* partial, int batch) {
    const int warp = threadIdx.x / 32;
    char* norms = shared + norms_begin(chain.slots, chain.steps, batch);
    const int norm_weight_bytes = WARPS * chain.norm_steps * LINE;
    char* area = norms;
#pragma unroll 1
    for (int l = 0; l < chain.count; ++l) {
        const Layer& layer = chain.layers[l];
        if (layer.kind == RESIDUAL) continue;
        one_input<T>(layer.norm).copy_weights(reinterpret_cast<T*>(area), layer.norm.linear.columns);
        area += norm_bytes(chain.norm_steps);
    }
    commit_copies();
    area = norms;
    Place place{0, 0}, buffer{0, 0};
    int begin = 0;
#pragma unroll 1
    for (int l = 0; l < chain.count; ++l) {
        const Layer& layer = chain.layers[l];
        const Shape shape(layer, begin);
        // A warp has a place of its own for its slice, whatever layer it is of: warps need not keep step.
        char* activations = shared + activations_begin(chain.slots) + warp * (chain.steps - shape.steps) * batch * LINE;
        wait_as_warp(barriers.ready[l], 0);
        if (layer.kind == RESIDUAL) {
            const SelectedRows source{layer.residual.selected, layer.residual.tokens};
            stage_as_is(static_cast<const T*>(layer.residual.input), source, activations, batch, shape.columns, shape.steps);
        } else {
            stage_normalized<T, 1, 2, EightRows>(
                one_input<T>(layer.norm), reinterpret_cast<const T*>(area),
                reinterpret_cast<float*>(area + norm_weight_bytes), activations, batch, shape.columns, shape.steps);
            area += norm_bytes(chain.norm_steps);
        }
        const unsigned own = staged_for_lane(activations, batch, shape.steps).address, ring = shared_address(shared);
        if (layer.kind == NORM_GATE_UP)
            multiply_layer<T, 2>(shape, barriers, ring, chain.slots, place, own, partial, buffer, batch);
        else multiply_layer<T, 1>(shape, barriers, ring, chain.slots, place, own, partial, buffer, batch);
    }
}

// What an output reads for itself, before the sums are there.
template <typename Output> __device__ __forceinline__ float read_one(const Output&, int, int, int) { return 0.f; }
template <typename T>
__device__ __forceinline__ float read_one(const ResidualOutput<T>& output, int b, int n, int rows) {
    return output.before(b, n, rows);
}
template <typename Output, int SUMS>
__device__ __forceinline__ void write_one(const Output& output, int b, int n, int rows, const float (&sum)[SUMS], float) {
    output(b, n, rows, sum);
}
template <typename T>
__device__ __forceinline__ void write_one(
    const ResidualOutput<T>& output, int b, int n, int rows, const float (&sum)[1], float before) {
    output.write(b, n, rows, sum, before);
}

// Adds the partial sums of the block's units in the order of linear.cu: a lane has a column of a unit and a group of slices.
template <typename T, int TILES, typename Output>
__device__ __forceinline__ void add_layer(
    const Shape& shape, Barriers& barriers, const T* bias, const Output& output, const float* partial, Place& buffer,
    int batch) {
    constexpr int GROUPS = SLICES / SLICES_OF_A_GROUP;
    static_assert(GROUPS * TILE_ROWS == 32, "a lane for every column and group");
    const int place = threadIdx.x % TILE_ROWS, group = threadIdx.x % 32 / TILE_ROWS, rows = shape.rows;
    float before = 0.f;
    T added[TILES];
    // Has what a unit's outputs need beside their sums read, while the unit in front is added.
    auto read = [&](int unit) {
        const int row = unit * TILE_ROWS + place;
        if (group > 0 || row >= rows) return;
        before = read_one(output, 0, row, rows);
        if (bias != nullptr)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) added[tile] = bias[tile * rows + row];
    };
    read(shape.first);
#pragma unroll 1
    for (int unit = shape.first; unit < shape.units; unit += gridDim.x) {
        const int row = unit * TILE_ROWS + place;
        const bool writes = group == 0 && row < rows;
        float first = before, own_bias[TILES];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) own_bias[tile] = bias == nullptr ? 0.f : to_float(added[tile]);
        read(unit + gridDim.x);
        wait_as_warp(barriers.summed[buffer.slot], buffer.parity);
        const float* slices =
            partial + (buffer.slot * WARPS + group * SLICES_OF_A_GROUP) * partials(batch) + place;
#pragma unroll 1
        for (int b = 0; b < batch; ++b) {
            float total[TILES];
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                float sum = 0.f;
#pragma unroll
                for (int i = 0; i < SLICES_OF_A_GROUP; ++i)
                    sum += slices[i * partials(batch) + (tile * batch + b) * TILE_ROWS];
                total[tile] = 0.f;
#pragma unroll
                for (int i = 0; i < GROUPS; ++i) total[tile] += __shfl_sync(FULL_WARP, sum, i * TILE_ROWS + place);
                if (bias != nullptr) total[tile] += own_bias[tile];
            }
            if (writes) write_one(output, b, row, rows, total, first);
            if (writes && b + 1 < batch) first = read_one(output, b + 1, row, rows);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(barriers.added[buffer.slot]);
        buffer.advance(BUFFERS);
    }
}

// One warp: the outputs of all layers.
template <typename T>
__device__ __forceinline__ void add(const Chain& chain, Barriers& barriers, const float* partial, int batch) {
    Place buffer{0, 0};
    int begin = 0;
#pragma unroll 1
    for (int l = 0; l < chain.count; ++l) {
        const Layer& layer = chain.layers[l];
        const Linear& linear = layer.linear();
        const Shape shape(layer, begin);
        const T* bias = static_cast<const T*>(linear.bias);
        wait_as_warp(barriers.ready[l], 0);
        if (layer.kind == NORM_GATE_UP) {
            const GatedOutput<T> output{static_cast<T*>(layer.norm.output), layer.norm.activation};
            add_layer<T, 2>(shape, barriers, bias, output, partial, buffer, batch);
        } else if (layer.kind == NORM_LINEAR) {
            const FloatOutput output{static_cast<float*>(layer.norm.output), linear.scale};
            add_layer<T, 1>(shape, barriers, bias, output, partial, buffer, batch);
        } else {
            const LinearResidual& given = layer.residual;
            const ResidualOutput<T> output{
                given.output, linear.scale, given.residual, given.residual_float != 0, {given.selected, given.tokens},
                static_cast<T*>(given.kept.target), given.kept.stride};
            add_layer<T, 1>(shape, barriers, bias, output, partial, buffer, batch);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0 && shape.first < shape.units && l + 1 < chain.count)  // behind what all lanes wrote
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(chain.counters + l) : "memory");
    }
}

// One thread: waits for each layer's input.
__device__ __forceinline__ void wait_for_inputs(const Chain& chain, Barriers& barriers) {
    wait_for_previous_kernel();
    arrive(barriers.ready[0]);
    int begin = 0;
#pragma unroll 1
    for (int l = 0; l + 1 < chain.count; ++l) {
        const unsigned blocks = Shape(chain.layers[l], begin).blocks();
        unsigned written;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(written) : "l"(chain.counters + l) : "memory");
        while (written != blocks);
        arrive(barriers.ready[l + 1]);
    }
    // Who comes last here knows that nobody reads the counters any more.
    unsigned* leaving = chain.counters + chain.count - 1;
    if (atomicAdd(leaving, 1u) != gridDim.x - 1) return;
#pragma unroll 1
    for (int l = 0; l < chain.count; ++l) chain.counters[l] = 0;
}

// Grid: at most as many blocks as can be on the GPU at once. All layers have the same rows of activations, up to eight.
template <typename T>
__global__ void __launch_bounds__(ALL_THREADS, 1) linear_chain(const __grid_constant__ Chain chain) {
    extern __shared__ __align__(1024) char shared[];
    const int warp = __shfl_sync(FULL_WARP, static_cast<int>(threadIdx.x / 32), 0), batch = chain.layers[0].linear().batch;
    int norms = 0;
#pragma unroll 1
    for (int l = 0; l < chain.count; ++l) norms += chain.layers[l].kind != RESIDUAL;
    float* partial = reinterpret_cast<float*>(
        shared + partials_begin(chain.slots, chain.steps, chain.norm_steps, norms, batch));
    Barriers& barriers = *reinterpret_cast<Barriers*>(
        shared + barriers_begin(chain.slots, chain.steps, chain.norm_steps, norms, batch));

    if (threadIdx.x == 0) {
        for (int i = 0; i < chain.slots; ++i) set_up(barriers.full[i], 1), set_up(barriers.empty[i], 1);
        for (int i = 0; i < BUFFERS; ++i) set_up(barriers.summed[i], 1), set_up(barriers.added[i], 1);
        for (int i = 0; i < chain.count; ++i) set_up(barriers.ready[i], 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    launch_next_kernel();
    if (warp < WARPS) multiply<T>(chain, barriers, shared, partial, batch);
    else if (warp == ADDING) add<T>(chain, barriers, partial, batch);
    else if (threadIdx.x % 32 > 0) return;
    else if (warp == COPYING) copy_weights(chain, barriers, shared_address(shared));
    else wait_for_inputs(chain, barriers);
}

}  // namespace chain
}  // namespace decode
