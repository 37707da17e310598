// Programmatic dependent launch (sm_90 and later): a kernel starts before its predecessor in the stream has finished.
#pragma once

// Lets the next kernel of the stream start its independent prologue; it waits in wait_for_previous_kernel.
__device__ __forceinline__ void launch_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns once the previous kernel has finished and its writes are visible. Every block of a kernel that overlaps its
// predecessor calls it, also idle ones: so a finished kernel implies that all kernels before it have finished too.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
