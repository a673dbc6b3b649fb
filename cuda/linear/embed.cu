// The op `embed`: x = rows `ids` of the embedding table, times scale.
//
// table (V, E), ids (T), x (T, E). An id below 0, of a token that could not be drawn, takes row 0.
// Grid (T), block any. DEFINES: WEIGHT (a weight format).
// PRECOND: E % 8 == 0; table and x aligned to 16 bytes; ids < V.
extern "C" __global__ void __launch_bounds__(1024)
embed_kernel(float *x, const unsigned char *table, const int *ids, int E, float scale) {
    let_next_begin();
    wait_for_previous();
    const int row = max(ids[blockIdx.x], 0);
    x += (long long)blockIdx.x * E;
    for (int i = threadIdx.x * 8; i < E; i += blockDim.x * 8) {
        float v[8];
        WEIGHT::floats(v, WEIGHT::load8(table, row, E, i));
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] *= scale;
        store_floats(x + i, v);
    }
}
