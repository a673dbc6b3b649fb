// Adds the splits of decode_attention.cu, scales the sums and rotates them back.
//
// out (T, H, D). part_acc (T, H, splits, DP): Σ 2^(score − max) v of each split, DP = D rounded up to 16.
// part_ml (T, H, splits, 2): max and Σ 2^(score − max); −inf and 0 if the split sees no token. A head without visible
// tokens gives 0.
// factors (H), or null for ones: multiply the result of each head.
// The rotation back is diag(before) · H/√ORDER · diag(behind), as in rotate.cu. With ORDER 1 there is no rotation, and
// the signs `before` and `behind` (D) are not read.
// DEFINES: D, ORDER, WARPS. PRECOND: part_acc aligned to 16 bytes; ORDER divides D, and is at most 32 or D % 32 == 0.
//
// Grid (T · H), block 32 · WARPS: the warps of a block share the splits of one head.

constexpr int DP = (D + 15) / 16 * 16, QUADS = (DP + 127) / 128;  // QUADS: groups of 4 channels of a lane

extern "C" __global__ void __launch_bounds__(WARPS * 32)
combine_kernel(float *out, const float *part_acc, const float *part_ml, const float *factors, const float *before,
               const float *behind, int heads, int splits) {
    __shared__ float4 sums_of_warps[WARPS][QUADS][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long head = blockIdx.x;
    part_acc += head * splits * DP;
    part_ml += head * splits * 2;

    float top = NEGATIVE_INFINITY, sum = 0.0f;
    for (int s = lane; s < splits; s += 32) top = fmaxf(top, part_ml[2 * s]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    const bool is_visible = top > NEGATIVE_INFINITY;
    for (int s = lane; s < splits; s += 32)
        if (is_visible) sum += exp2_fast(part_ml[2 * s] - top) * part_ml[2 * s + 1];
    const float factor = factors ? factors[head % heads] : 1.0f, share = is_visible ? factor / warp_sum(sum) : 0.0f;

    float4 total[QUADS] = {};
#pragma unroll 4
    for (int s = warp; s < splits; s += WARPS) {
        const float weight = is_visible ? exp2_fast(part_ml[2 * s] - top) * share : 0.0f;
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            const int channel = 128 * i + 4 * lane;
            if (channel >= DP) continue;
            const float4 x = *reinterpret_cast<const float4 *>(part_acc + (long long)s * DP + channel);
            total[i].x += x.x * weight, total[i].y += x.y * weight;
            total[i].z += x.z * weight, total[i].w += x.w * weight;
        }
    }
#pragma unroll
    for (int i = 0; i < QUADS; ++i) sums_of_warps[warp][i][lane] = total[i];
    __syncthreads();
    const float *sums = reinterpret_cast<const float *>(sums_of_warps);
    const auto sum_of = [&](int channel) {
        float x = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) x += sums[w * QUADS * 128 + channel];
        return x;
    };
    out += head * D;
#if ORDER == 1
    for (int channel = threadIdx.x; channel < D; channel += WARPS * 32) out[channel] = sum_of(channel);
#else
    __shared__ float vector[D];
    for (int channel = threadIdx.x; channel < D; channel += WARPS * 32)
        vector[channel] = sum_of(channel) * before[channel];
    __syncthreads();
    if (warp > 0) return;
    float v[(D + 31) / 32];
#pragma unroll
    for (int i = 0; i < (D + 31) / 32; ++i) v[i] = lane + 32 * i < D ? vector[lane + 32 * i] : 0.0f;
    hadamard<ORDER>(v);
#pragma unroll
    for (int i = 0; i < (D + 31) / 32; ++i)
        if (lane + 32 * i < D) out[lane + 32 * i] = v[i] * behind[lane + 32 * i];
#endif
}
