// Part of the op `encode_blocks`: keys whose codes are of pairs, by a metric, with the best of several norms, on tensor
// cores. Codes are chosen as engine/quantization/encode.py chooses them; `encode_blocks` takes all other sides.
//
// sides, jobs: as encode_blocks.cu lists them, of keys alone. Of the arrays of a metric it reads `feedback`,
// `residues`, (K, D / 2, 4): what squares of the residues of two channels cost (the first's, of both together, the
// second's), and what is too much in that, the ridge; and `mean_query`.
//
// Grid (count, K), block WARPS · 32, dynamic shared memory sizeof(KeyArrays).
// DEFINES: as in encode_blocks.cu; TOKENS, 16, 32 or 64, a divisor of N; WARPS · 32 >= TOKENS ·
// (1 + the number of norms).
// PRECOND: D a multiple of 8, at most 128; as encode_blocks.cu.
// JOINS: full_block.cuh, nearest.cuh, tilt.cuh, key_rounding.cuh.

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
encode_keys_kernel(const unsigned long long *sides, const int *jobs, int kv_heads) {
    DYNAMIC_SHARED(unsigned char, shared);
    const int *job = jobs + 3 * blockIdx.x;
    const SideArrays *side = reinterpret_cast<const SideArrays *>(sides) + job[0];
    KeyRounder<KeyLayout, KeyCodec, Move<KeyLayout, FullKeyLayout>>(shared, {side, job, kv_heads}).encode();
}
