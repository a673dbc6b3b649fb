// Write the new tokens' keys and values, rotated, where their sequences keep full precision.
//
// k, v: K vectors of D for each token, token t's first at k + t · k_stride. now_k, now_v: buffers in which KV head h of
// token t goes to offsets[t] + h · head_stride. offsets (T). All counts are elements.
// Grid (T), block any. DEFINES: ACT, STORE (type of the buffers), D.
// PRECOND: D % 8 == 0; pointers aligned to 16 bytes, strides and offsets multiples of 8; no two tokens share a place.
extern "C" __global__ void __launch_bounds__(1024)
append_kv_kernel(STORE *now_k, STORE *now_v, const ACT *k, const ACT *v, const long long *offsets, int kv_heads,
                 long long k_stride, long long v_stride, long long head_stride) {
    constexpr int chunks = D / 8;
    const long long offset = offsets[blockIdx.x];
    k += blockIdx.x * k_stride;
    v += blockIdx.x * v_stride;
    for (int i = threadIdx.x; i < kv_heads * chunks; i += blockDim.x) {
        const long long to = offset + i / chunks * head_stride + i % chunks * 8;
        float values[8];
        load_floats(values, k + i * 8);
        store_floats(now_k + to, values);
        load_floats(values, v + i * 8);
        store_floats(now_v + to, values);
    }
}
