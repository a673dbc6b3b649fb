// Rows of a packed matrix in half precision, the same numbers that gemm_wide multiplies.
//
// y (rows, in) = rows first … of the matrix.
// Grid (rows), block any. DEFINES: WEIGHT (a packed format).
// PRECOND: in % VALUES == 0; y and matrix aligned to 16 bytes.
extern "C" __global__ void __launch_bounds__(1024)
dequantize_kernel(__half *y, const unsigned char *matrix, int first, int in) {
    uint4 *const to = reinterpret_cast<uint4 *>(y + blockIdx.x * (long long)in);
    for (int i = threadIdx.x; i < in / 8; i += blockDim.x) {
        const WEIGHT::Eight eight = WEIGHT::load8(matrix, first + blockIdx.x, in, 8 * i);
        to[i] = WEIGHT::halves(eight.codes, eight.factors);
    }
}
