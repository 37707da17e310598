// Which of several threads, of blocks that know nothing of each other, comes last.
#pragma once

// Whether the calling thread is the last of `total` to come to a counter, which is then 0 again. What the others wrote before is
// then visible to it, also what threads of their blocks wrote before a barrier; and to threads behind a barrier with it. One
// instruction releases and acquires: a fence before and one behind an atomic wait for all of the multiprocessor's memory.
__device__ __forceinline__ bool last_of(unsigned* counter, unsigned total) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter)), "r"(total - 1)
                 : "memory");
    return before == total - 1;
}
