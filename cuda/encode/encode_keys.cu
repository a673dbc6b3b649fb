// Part of the op `encode_blocks`: keys with the best of several norms for the queries that lean towards them, by a
// metric, on tensor cores. Codes are chosen as engine/quantization/encode.py does; `encode_blocks` takes all other sides.
//
// sides, jobs: as encode_blocks.cu lists them, of keys alone. It reads of the arrays of a metric: mean_query; and
//   feedback __half (K, D / 8, D / 8, 32, 2, 2)  F in tiles of 8 × 8: those from group i of channels to group j. Lane
//                                                4g + t has the weights from channels 2t, 2t + 1 to channel g, high
//                                                parts, then low ones
//   residues (K, D / 2, 4)                       of two channels: what the residue of the first one costs, both
//                                                together, the second one; the ridge, which these costs contain,
//                                                negative if errors are not fed back
// Grid (count, K), block WARPS · 32, dynamic shared memory sizeof(KeyArrays).
// DEFINES: as encode_blocks.cu; TOKENS, 16, 32 or 64, a divisor of N; WARPS · 32 >= TOKENS · (1 + the number of norms).
// PRECOND: D a multiple of 8; as encode_blocks.cu.
// JOINS: full_block.cuh, nearest.cuh, tilt.cuh, key_rounding.cuh.

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
encode_keys_kernel(const unsigned long long *sides, const int *jobs, int kv_heads) {
    DYNAMIC_SHARED(unsigned char, shared);
    const int *job = jobs + 3 * blockIdx.x;
    const SideArrays *side = reinterpret_cast<const SideArrays *>(sides) + job[0];
    KeyRounder<KeyLayout, KeyCodec, Move<KeyLayout, FullKeyLayout>>(shared, {side, job, kv_heads}).encode();
}
