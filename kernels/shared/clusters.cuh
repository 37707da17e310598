// Clusters of blocks (sm_90 and later), which read each other's shared memory. Elsewhere a block is alone.
#pragma once

// Waits for all threads of the cluster, and makes visible what they wrote to shared memory.
__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The same in two halves, between which other work is done; every thread of a cluster does both, or ends. Who has written
// nothing yet releases nothing: a release waits for the multiprocessor's writes.
template <bool RELEASES = true> __device__ __forceinline__ void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
    if constexpr (RELEASES) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    else asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Where, in block `rank` of the cluster, lies what the pointer names in the own shared memory.
template <typename T> __device__ __forceinline__ T* pointer_in_block(T* pointer, int rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.u64 %0, %0, %1;" : "+l"(pointer) : "r"(rank));
#endif
    return pointer;
}

// The address, in block `rank` of the cluster, of what lies at `address` in the own shared memory.
__device__ __forceinline__ unsigned address_in_block(unsigned address, int rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
    return address;
}

__device__ __forceinline__ float read_cluster(unsigned address) {
    float value;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address));
#else
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
#endif
    return value;
}
