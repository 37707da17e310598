// How blocks walk over the tiles of linear.cu, or over those of a mixture's experts, whose rows are sorted, and write
// what becomes of the sums.
#pragma once
#include "prefill/linear_adapters.cuh"
#include "prefill/linear_packed.cuh"
#include "prefill/linear_sums.cuh"

namespace prefill {

// Where the output has what the sums of a row of the tiles become; below 0: nowhere.
__device__ __forceinline__ int output_row(int row) { return row; }
__device__ __forceinline__ int output_row(int row, const SortedRows& sorted) { return __ldcg(sorted.target + row); }

// Where the biases of a tile's expert begin, of those of all.
template <typename G, typename T>
__device__ __forceinline__ const T* bias_of(const T* all, const Place& place, const SortedRows& sorted) {
    if (all == nullptr) return nullptr;
    return all + static_cast<size_t>(sorted.expert_of<G>(place)) * sorted.bias_elements;
}

// What becomes of a thread's sums, of a tile all of whose columns exist, in even rows. What stands there before is read
// for several rows at once: a warp waits for it, and registers hold it. rows: the layer's outputs, of gates and ups half
// of its weight rows.
template <typename T, typename G, typename Output, typename... Sorted>
__device__ __forceinline__ void write_columns(
    const Sums<G>& total, const Lane<G>& lane, const T* bias, const Output& output, const Place& place, int batch,
    int rows, const Sorted&... sorted) {
    __builtin_assume(rows % 2 == 0);
    constexpr int ALL = 2 * G::ROW_TILES, FITTING = 16 / G::COLUMN_TILES, AT_ONCE = FITTING < ALL ? FITTING : ALL;
    float2 added[G::COLUMN_TILES] = {};
#pragma unroll
    for (int c = 0; c < G::COLUMN_TILES; ++c) {
        const int s = c % G::SUMS, n = place.column + lane.weight_row_of(c - s);
        if (bias != nullptr) added[c] = read_two(bias + s * rows + n, n, rows);
    }
#pragma unroll
    for (int first = 0; first < ALL; first += AT_ONCE) {
        float2 before[AT_ONCE][G::COLUMN_TILES];
        int target[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE && first + i < ALL; ++i) {
            const int row = place.row + lane.row_of((first + i) / 2, (first + i) % 2);
            target[i] = row < batch ? output_row(row, sorted...) : -1;
#pragma unroll
            for (int c = 0; c < G::COLUMN_TILES; c += G::SUMS)
                if (target[i] >= 0)
                    before[i][c] = output.before_two(target[i], place.column + lane.weight_row_of(c), rows);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE && first + i < ALL; ++i) {
            const int r = (first + i) / 2, half = (first + i) % 2;
            if (target[i] < 0) continue;
#pragma unroll
            for (int c = 0; c < G::COLUMN_TILES; c += G::SUMS) {
                float2 one[G::SUMS];
#pragma unroll
                for (int s = 0; s < G::SUMS; ++s)
                    one[s] = make_float2(total[r][c + s][2 * half] + added[c + s].x,
                                         total[r][c + s][2 * half + 1] + added[c + s].y);
                output.two(target[i], place.column + lane.weight_row_of(c), rows, one, before[i][c]);
            }
        }
    }
}

// The same of other tiles.
template <typename T, typename G, typename Output, typename... Sorted>
__device__ __forceinline__ void write_part(
    const Sums<G>& total, const Lane<G>& lane, const T* bias, const Output& output, const Place& place, int batch,
    int rows, const Sorted&... sorted) {
    for_each_sum<G>([&](int r, int c, int i) {
        const int row = place.row + lane.row_of(r, i / 2), n = place.column + lane.weight_row_of(c) + i % 2;
        if (c % G::SUMS != 0 || row >= batch || n >= rows) return;
        const int b = output_row(row, sorted...);
        if (G::SORTED && b < 0) return;
        float one[G::SUMS];
#pragma unroll
        for (int s = 0; s < G::SUMS; ++s) {
            one[s] = total[r][c + s][i];
            if (bias != nullptr) one[s] += to_float(bias[s * rows + n]);
        }
        output(b, n, rows, one, output.before(b, n, rows));
    });
}

template <typename T, typename G, typename Output, typename... Sorted>
__device__ __forceinline__ void finish(
    Sums<G>& total, const Lane<G>& lane, const T* bias, const Output& output, const Place& place, const Linear& linear,
    int rows, const Sorted&... sorted) {
    if constexpr (G::ADAPTED) add_adapters<T, G>(total, lane, linear, place);
    if constexpr (G::SORTED) bias = bias_of<G>(bias, place, sorted...);
    if (place.column + G::UNIT <= rows && rows % 2 == 0)
        write_columns<T, G>(total, lane, bias, output, place, linear.batch, rows, sorted...);
    else write_part<T, G>(total, lane, bias, output, place, linear.batch, rows, sorted...);
}

// sorted: nothing, or `SortedRows`, for whose tiles `linear.batch` has room at least.
// Grid: as many blocks as run at once, or where groups are joined one for each tile. Dynamic shared memory: the ring of
// stages, then totals.
template <typename T, typename G, typename Output, typename... Sorted>
__device__ __forceinline__ void multiply(
    const TiledLinear& arguments, const T* weight, int rows, const T* bias, const Output& output,
    const Sorted&... sorted) {
    extern __shared__ __align__(128) char shared[];
    static_assert(G::STAGE_BYTES == HOST_STAGE_BYTES, "as the host counts them");
    const Linear& linear = arguments.linear;
    const int team_columns = SLICES_OF_A_GROUP * linear.steps * 32;
    const int own_columns = G::TEAMS > 1 ? min(team_columns, linear.columns) : linear.columns;
    OperandsOf<T, G> operands{weight, static_cast<const T*>(arguments.input), arguments.stride, linear.batch, rows,
                              linear.columns, team_columns, {arguments.selected, arguments.tokens}, sorted...};
    launch_next_kernel();
    Work work(G::ROWS, G::UNIT, linear.batch, rows, (own_columns + G::STAGE_COLUMNS - 1) / G::STAGE_COLUMNS);
    if constexpr (G::SORTED) work = Work(G::ROWS, G::UNIT, operands.begin(), rows, work.chunks);
    using Weights = WeightsOf<T, G>;
    Copies<T, G, typename Weights::Copies> chunks(operands, work, shared);
    const Lane<G> lane;
    float4* totals = reinterpret_cast<float4*>(shared + STAGES * G::STAGE_BYTES) + threadIdx.x;
    const unsigned zero = linear.adapters.low_units;  // which only kernels of few rows have
    TileSums<T, G> sums(totals, linear.steps);
    typename Weights::Fragments fragments(zero);
    fragments.read(chunks.next_stage(), lane);
    for (int tile = blockIdx.x; tile < work.tiles; tile += gridDim.x) {
        sums.begin();
#pragma unroll 1
        for (int chunk = 0; chunk < work.chunks; ++chunk) {
            chunks.copy();
            const char* stage = chunks.stage();
            // Behind the last chunk of the last tile something is read that nobody multiplies.
            const auto next = [&] { return chunks.next_stage(); };
            if constexpr (G::IS_PACKED) {
                sums.template multiply<0>(fragments, stage, lane, next);
                sums.template multiply<1>(fragments, stage, lane, next);
                sums.template multiply<2>(fragments, stage, lane, next);
                sums.template multiply<3>(fragments, stage, lane, next);
            } else {
                const char* second = stage + G::STEP_BYTES;
                sums.template multiply<0>(fragments, stage, lane, [&] { return second; });
                sums.template multiply<1>(fragments, second, lane, next);
            }
        }
        const Place place = work.place_of(tile);
        if constexpr (G::TOTALS == JOINED) {
            constexpr int HIGH = G::ROW_TILES, WIDE = G::TEAMS / HIGH;  // parts of a warp's tiles
            using Part = Geometry<1, G::COLUMN_TILES / WIDE, HIGH * G::ROW_WARPS, WIDE * G::COLUMN_WARPS, REGISTERS,
                                  G::PAIRED, G::ADAPTED, G::SCALES, G::MODE, G::SORTED>;
            const int team = threadIdx.x / G::TEAM, warp = threadIdx.x % G::TEAM / 32;
            const Lane<Part> own(warp % G::ROW_WARPS * HIGH + team / WIDE, warp / G::ROW_WARPS * WIDE + team % WIDE);
            Sums<Part> joined;
            sums.template join<Part>(joined, shared);
            if constexpr (G::IS_PACKED) turn<Part>(joined);
            finish<T, Part>(joined, own, bias, output, place, linear, rows, sorted...);
        } else {
            sums.end();
            if constexpr (G::IS_PACKED) turn<G>(sums.total);
            finish<T, G>(sums.total, lane, bias, output, place, linear, rows, sorted...);
        }
    }
}

}  // namespace prefill
