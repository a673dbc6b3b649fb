// The op `decode_blocks`: quantized blocks are decoded into full-precision records, rounded to half
// precision as in attention of a prompt.
//
// to_k, to_v (count, K, …): full-precision records. keys, values (blocks, K, …): pools of quantized records. ids int32
// (count): which blocks. key_tables, value_tables: the codecs'.
// Grid (count, K), block WARPS · 32, dynamic shared memory SHARED: the tables of both codecs. DEFINES: WARPS, SHARED.
// PRECOND: records aligned to 128 bytes, tables to 16.
// JOINS: attention.cuh, decode_parts.cuh.

static_assert(SHARED == Tables::BYTES, "as named above");

extern "C" __global__ void __launch_bounds__(WARPS * 32)
decode_blocks_kernel(unsigned char *to_k, unsigned char *to_v, const unsigned char *keys, const unsigned char *values,
                     const int *ids, const unsigned char *key_tables, const unsigned char *value_tables, int kv_heads) {
    DYNAMIC_SHARED(unsigned char, shared);
    Tables::fill<WARPS * 32>(shared, key_tables, value_tables);
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long from = (long long)ids[blockIdx.x] * kv_heads + blockIdx.y;
    const long long to = (long long)blockIdx.x * kv_heads + blockIdx.y;
    const unsigned char *const key = keys + from * KeyLayout::STRIDE;
    const unsigned char *const value = values + from * ValueLayout::STRIDE;
#pragma unroll 1
    for (int part = 0; part < PARTS; ++part) {
        const int at = part * TILES * 512;
        decode_keys(to_k + to * FullKeyLayout::NBYTES + at, key, part, Tables::keys(shared), warp, lane);
        if (to_v)  // else values are keys
            decode_values(to_v + to * FullValueLayout::NBYTES + at, value, part, Tables::values(shared), warp, lane);
    }
}
