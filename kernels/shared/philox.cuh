// Philox4x32-10 (J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
#pragma once

// Four random words that depend on the counter and the key alone.
__device__ inline uint4 philox_4x32(uint4 counter, uint2 key) {
    for (int number = 0; number < 10; ++number) {
        unsigned high_0 = __umulhi(0xD2511F53u, counter.x), low_0 = 0xD2511F53u * counter.x;
        unsigned high_2 = __umulhi(0xCD9E8D57u, counter.z), low_2 = 0xCD9E8D57u * counter.z;
        counter = make_uint4(high_2 ^ counter.y ^ key.x, low_2, high_0 ^ counter.w ^ key.y, low_0);
        key.x += 0x9E3779B9u;
        key.y += 0xBB67AE85u;
    }
    return counter;
}
