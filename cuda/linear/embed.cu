// x = rows `ids` of a table, times scale.
//
// table (V, E), ids (T), x (T, E).
// Grid (T), block any. DEFINES: ACT, WEIGHT.
// PRECOND: E % 8 == 0; table and x aligned to 16 bytes; 0 <= ids < V.
extern "C" __global__ void __launch_bounds__(1024) embed_kernel(ACT *x, const WEIGHT *table, const int *ids, int E, float scale) {
    const WEIGHT *row = table + (long long)ids[blockIdx.x] * E;
    x += (long long)blockIdx.x * E;
    for (int i = threadIdx.x * 8; i < E; i += blockDim.x * 8) {
        float v[8];
        load_floats(v, row + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] *= scale;
        store_floats(x + i, v);
    }
}
