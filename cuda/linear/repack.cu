// Rows of a packed weight format, from the bytes of a file to the tiles of packed_weights.cuh.
//
// matrix: tiles; raw (rows, bytes of a row); the rows become rows first … of the matrix.
// Grid (rows, ceil(in / 8 / block)), block any. DEFINES: WEIGHT (a packed format).
// PRECOND: in % VALUES == 0; matrix aligned to 16 bytes, rows of its last tile that no slab has set are zero.
extern "C" __global__ void __launch_bounds__(1024)
repack_kernel(unsigned char *matrix, const unsigned char *raw, int first, int in) {
    const int k = (blockIdx.y * blockDim.x + threadIdx.x) * 8, row = blockIdx.x;
    if (k >= in) return;
    WEIGHT::repack8(matrix, raw + row * (long long)(in / WEIGHT::VALUES) * WEIGHT::NBYTES, first + row, in, k);
}
