// Blocks of a launch that share a result, of which the last one finishes it: no block waits. Part of
// decode_attention.cu and sample.cu.

// Whether this block is the last of `sharing` to call it with `count`. Then, behind a barrier, it may read what the
// others have stored before a barrier and their call, and the count is zero again. One thread of a block calls it.
__device__ __forceinline__ bool arrives_last(int *count, int sharing) {
    fence_gpu();
    if (atomicAdd(count, 1) + 1 < sharing) return false;
    fence_gpu();
    atomicExch(count, 0);  // behind the fence, which would wait for it as well
    return true;
}
