// The op `copy_full`: copies the first tokens of a full-precision block, keys and values of all KV heads, from one pool
// to another.
//
// Pools (records, K, bytes) of full-precision records: record from_index of from_k and from_v is copied to record
// to_index of to_k and to_v. Tokens from number `tokens` on are zero in the copy: attention multiplies them by 0, so
// they must be finite.
// Grid (K, 2): keys, values. Block: whole warps. DEFINES: none.
// PRECOND: 0 <= tokens <= N; the two records are not the same one.

// A mask of a register whose halves belong to tokens `low` and `high`: it keeps those before `tokens`.
__device__ __forceinline__ unsigned kept_halves(int low, int high, int tokens) {
    return (low < tokens ? 0x0000ffffu : 0u) | (high < tokens ? 0xffff0000u : 0u);
}

extern "C" __global__ void __launch_bounds__(1024)
copy_full_kernel(unsigned char *to_k, unsigned char *to_v, const unsigned char *from_k, const unsigned char *from_v,
                 int to_index, int from_index, int tokens, int kv_heads) {
    using Layout = FullKeyLayout;
    const bool is_key = blockIdx.y == 0;
    const long long to_record = (long long)to_index * kv_heads + blockIdx.x;
    const long long from_record = (long long)from_index * kv_heads + blockIdx.x;
    unsigned char *const target = (is_key ? to_k : to_v) + to_record * Layout::NBYTES;
    const unsigned char *const origin = (is_key ? from_k : from_v) + from_record * Layout::NBYTES;
    uint4 *const to = reinterpret_cast<uint4 *>(target);
    const uint4 *const from = reinterpret_cast<const uint4 *>(origin);
    for (int i = threadIdx.x; i < Layout::PARTS * Layout::TILES * 32; i += blockDim.x) {
        const int part = i / (Layout::TILES * 32), tile = i / 32 % Layout::TILES, g = i % 32 / 4, tg = i % 4;
        const int row = part * Layout::PART + (is_key ? tile % Layout::PT : tile / Layout::STEPS) * 16;
        const int token = row + (is_key ? g : 2 * tg), next = is_key ? token : token + 1;
        const unsigned low = kept_halves(token, next, tokens), high = kept_halves(token + 8, next + 8, tokens);
        const uint4 a = low ? from[i] : make_uint4(0, 0, 0, 0);  // behind the last token nothing may be written
        to[i] = is_key ? make_uint4(a.x & low, a.y & low, a.z & high, a.w & high)  // a[0], a[2], a[1], a[3]
                       : make_uint4(a.x & low, a.y & high, a.z & low, a.w & high);
    }
}
