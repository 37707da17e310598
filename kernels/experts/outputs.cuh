// What becomes of the sums of a product of a row with an expert, whichever kernel makes them.
#pragma once

namespace experts {

// silu(gate) up of gates, then ups; `clamped` of those that alternate; or the sums.
enum Kind { GATED, ALTERNATING, SUMS };

// (up + 1) gate sigmoid(1.702 gate) of a gate that is at most the limit and an up within it.
__device__ __forceinline__ float clamped(float gate, float up, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return (up + 1.f) * (gate / (1.f + expf(-1.702f * gate)));
}

}  // namespace experts
