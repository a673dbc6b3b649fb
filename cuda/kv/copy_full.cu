// The op `copy_full`: copies the first tokens of full-precision blocks, keys and values of all KV heads, from one pool
// to another, in several layers.
//
// layers (layers, 4): for each layer the addresses of to_k, to_v, from_k, from_v, pools (records, K, bytes) of
// full-precision records. moves int32 (count, 3): in all layers, record moves[i][1] of from_k and from_v is copied to
// record moves[i][0] of to_k and to_v. Tokens from number moves[i][2] on are zero in the copy: attention multiplies
// them by 0, so they must be finite.
// Grid (layers · count, K, 2): keys, values. Block: whole warps. DEFINES: none.
// PRECOND: 0 <= moves[i][2] <= N; no record is written twice, or read and written.

// A mask of a register whose halves belong to tokens `low` and `high`: it keeps those before `tokens`.
__device__ __forceinline__ unsigned kept_halves(int low, int high, int tokens) {
    return (low < tokens ? 0x0000ffffu : 0u) | (high < tokens ? 0xffff0000u : 0u);
}

extern "C" __global__ void __launch_bounds__(1024)
copy_full_kernel(const unsigned long long *layers, const int *moves, int count, int kv_heads) {
    using Layout = FullKeyLayout;
    const bool is_key = blockIdx.z == 0;
    const int *move = moves + 3 * (blockIdx.x % count), tokens = move[2];
    const unsigned long long *pools = layers + 4 * (blockIdx.x / count) + blockIdx.z;
    const auto record = [&](int index) { return (index * (long long)kv_heads + blockIdx.y) * Layout::NBYTES; };
    uint4 *const to = reinterpret_cast<uint4 *>(reinterpret_cast<unsigned char *>(pools[0]) + record(move[0]));
    const uint4 *const from =
        reinterpret_cast<const uint4 *>(reinterpret_cast<const unsigned char *>(pools[2]) + record(move[1]));
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
