// Copies records from one pool to another: blocks out of the KV store into an array without gaps, or back.
//
// Pools (records, K, bytes): for all KV heads, record moves[i][0] of `from` is copied to record moves[i][1] of `to`.
// moves int32 (count, 2).
// Grid (count). Block: whole warps. DEFINES: none.
// PRECOND: bytes, of a record's K heads together, is a multiple of 16; no record is written twice.

extern "C" __global__ void __launch_bounds__(1024)
copy_records_kernel(unsigned char *to, const unsigned char *from, const int *moves, int bytes) {
    const long long origin = moves[2 * blockIdx.x], target = moves[2 * blockIdx.x + 1];
    const uint4 *const a = reinterpret_cast<const uint4 *>(from + origin * bytes);
    uint4 *const b = reinterpret_cast<uint4 *>(to + target * bytes);
    for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) {
        b[i] = a[i];
    }
}
