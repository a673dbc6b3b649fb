// Blocks of a launch that share a result, which the last one finishes: no block waits. Part of decode_attention.cu and
// sample.cu.

// Whether this is the last of `sharing` calls with `count`. Then its thread, and others after a barrier, may read what
// the others have stored before a barrier and their call, and the count is zero again.
__device__ __forceinline__ bool arrives_last(int *count, int sharing) {
    return count_up(count, sharing - 1) + 1 == sharing;
}
