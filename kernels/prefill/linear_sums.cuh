// A thread's sums over the columns of a tile of linear.cu: of the slice, of the group, and of all groups, where the
// geometry has them.
#pragma once
#include "prefill/linear_tiles.cuh"

namespace prefill {

// A thread's sums over the columns of a tile.
template <typename T, typename G> struct TileSums {
    Sums<G> slice, group, total;  // a total in shared memory is `place`, and in registers only at the end
    float4* place;
    int steps, steps_left, slices_left;
    bool has_total;

    __device__ TileSums(float4* own, int steps_of_slice) : place(own), steps(steps_of_slice) {}
    __device__ void begin() {
        steps_left = 0, slices_left = SLICES_OF_A_GROUP + 1, has_total = false;
        for_each_sum<G>([&](int r, int c, int i) {
            slice[r][c][i] = group[r][c][i] = 0.f;
            if (G::TOTALS == REGISTERS) total[r][c][i] = 0.f;
        });
    }
    // Multiplies the step number STEP of a stage, and reads what the next one begins with; see the fragments.
    template <int STEP, typename Its, typename Next>
    __device__ void multiply(Its& fragments, const char* place, const Lane<G>& lane, const Next& next) {
        fragments.begin();
        if (steps_left != 0) {
            fragments.template multiply<NOTHING, STEP>(*this, place, lane, next);
        } else {
            steps_left = steps;
            if (--slices_left != 0) {
                fragments.template multiply<SLICE, STEP>(*this, place, lane, next);
            } else {
                slices_left = SLICES_OF_A_GROUP;
                fragments.template multiply<GROUP, STEP>(*this, place, lane, next);
                has_total = true;
            }
        }
        --steps_left;
    }
    // Each sum is added where its next product is made, so that additions stand between products.
    template <int BEGINS> __device__ void begin(int r, int c) {
        if (BEGINS != NOTHING) end_slice(r, c);
        if (BEGINS == GROUP) end_group(r, c);
    }
    // Leaves all of it in `total`.
    __device__ void end() {
        for_each_sum<G>([&](int r, int c, int i) { group[r][c][i] += slice[r][c][i]; });
        if constexpr (G::TOTALS == SHARED) {
            const bool adds = has_total;
            for_each_place([&](int r, int c, float4& own) {
                const float4 before = adds ? own : make_float4(0.f, 0.f, 0.f, 0.f);
                total[r][c][0] = before.x, total[r][c][1] = before.y;
                total[r][c][2] = before.z, total[r][c][3] = before.w;
            });
        }
        for_each_sum<G>([&](int r, int c, int i) { total[r][c][i] += group[r][c][i]; });
    }
    // Of a team's group alone: leaves the group's sums in shared memory, and in `joined` those of all groups, of a
    // fourth of the thread's tiles: one row tile, of two that there are half of the column tiles.
    template <typename Part> __device__ void join(Sums<Part>& joined, char* shared) {
        constexpr int TILES = G::ROW_TILES * G::COLUMN_TILES;
        static_assert(Part::COLUMN_TILES * G::TEAMS == TILES, "each team joins a fourth of the sums");
        float4* area = reinterpret_cast<float4*>(shared) + threadIdx.x % G::TEAM;
        const int team = threadIdx.x / G::TEAM;
        wait_for_copies<0>();
        __syncthreads();  // the ring, whose memory takes the sums, has been read by all
#pragma unroll
        for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
            for (int c = 0; c < G::COLUMN_TILES; ++c) {
                const float(&last)[4] = slice[r][c], (&own)[4] = group[r][c];
                area[(team * TILES + r * G::COLUMN_TILES + c) * G::TEAM] =
                    make_float4(own[0] + last[0], own[1] + last[1], own[2] + last[2], own[3] + last[3]);
            }
        __syncthreads();
        const int first = team * Part::COLUMN_TILES;
#pragma unroll
        for (int c = 0; c < Part::COLUMN_TILES; ++c) {
            float(&sum)[4] = joined[0][c];
            sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
#pragma unroll
            for (int g = 0; g < G::TEAMS; ++g) {
                const float4 more = area[(g * TILES + first + c) * G::TEAM];
                sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
            }
        }
    }

  private:
    template <typename Action> __device__ void for_each_place(const Action& action) {
#pragma unroll
        for (int r = 0; r < G::ROW_TILES; ++r)
#pragma unroll
            for (int c = 0; c < G::COLUMN_TILES; ++c) action(r, c, place[(r * G::COLUMN_TILES + c) * G::THREADS]);
    }
    __device__ void end_slice(int r, int c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) group[r][c][i] += slice[r][c][i], slice[r][c][i] = 0.f;
    }
    __device__ void end_group(int r, int c) {
        float(&sum)[4] = group[r][c];
        if constexpr (G::TOTALS == SHARED) {
            float4& own = place[(r * G::COLUMN_TILES + c) * G::THREADS];
            const float4 before = has_total ? own : make_float4(0.f, 0.f, 0.f, 0.f);
            own = make_float4(before.x + sum[0], before.y + sum[1], before.z + sum[2], before.w + sum[3]);
        } else if constexpr (G::TOTALS == REGISTERS) {
#pragma unroll
            for (int i = 0; i < 4; ++i) total[r][c][i] += sum[i];
        }
        sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
    }
};

}  // namespace prefill
