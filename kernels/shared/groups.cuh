// Rows of the vocabulary in groups of four neighbouring tokens: one vector load where the address allows it.
#pragma once

#include "shared/ordered_keys.cuh"

struct Group {
    float value[4];
};

__device__ inline bool aligned_16(const void* pointer) { return ((unsigned long long)pointer & 15) == 0; }

__device__ inline unsigned group_count(unsigned vocabulary) { return (vocabulary + 3) / 4; }

// From the second-level cache: a kernel that starts before its predecessor has finished may find old lines in the first.
// The values of tokens 4 * group to 4 * group + 3; beyond the row's end -inf, which loses ties as its ids are higher.
__device__ inline Group load_group(const float* row, unsigned vocabulary, unsigned group, bool aligned) {
    Group result;
    unsigned id = 4 * group;
    if (aligned && id + 4 <= vocabulary) {
        float4 values = __ldcg(reinterpret_cast<const float4*>(row + id));
        result.value[0] = values.x, result.value[1] = values.y, result.value[2] = values.z, result.value[3] = values.w;
    } else {
        for (unsigned i = 0; i < 4; ++i) {
            result.value[i] = id + i < vocabulary ? __ldcg(row + id + i) : minus_infinity();
        }
    }
    return result;
}
