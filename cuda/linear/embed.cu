// x = rows `ids` of a table.
//
// table (V, E), ids (T), x (T, E).
// Grid (T), block any. DEFINES: ACT, WEIGHT.
// PRECOND: E % 8 == 0; table and x aligned to 16 bytes; 0 <= ids < V.
extern "C" __global__ void __launch_bounds__(1024) embed_kernel(ACT *x, const WEIGHT *table, const int *ids, int E) {
    const WEIGHT *row = table + (long long)ids[blockIdx.x] * E;
    x += (long long)blockIdx.x * E;
    for (int i = threadIdx.x * 8; i < E; i += blockDim.x * 8) {
        float v[8];
        load_floats(v, row + i);
        store_floats(x + i, v);
    }
}
