// Rows of a packed matrix in half precision, the same numbers that gemm_wide multiplies.
//
// y (rows, in) = rows first … of the matrix. A block has 16 rows, whose inputs its warps take in turn, 32 at a time. A
// warp has TOGETHER of these on their way: with one, loads and the stores after them take turns.
// Grid (rows / 16, rounded up), block a multiple of 32. DEFINES: WEIGHT (a packed format).
// PRECOND: first % 16 == 0, in % VALUES == 0; y and matrix aligned to 16 bytes.
constexpr int TOGETHER = 4;

extern "C" __global__ void __launch_bounds__(256)
dequantize_kernel(__half *y, const unsigned char *matrix, int first, int rows, int in) {
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32, row = blockIdx.x * 16 + lane / 4;
#pragma unroll 1
    for (int part = threadIdx.x / 32; part < in / 32; part += TOGETHER * warps) {
        WEIGHT::Eight own[TOGETHER][2];  // of rows `row` and `row` + 8
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (const int at = part + i * warps; at < in / 32)
                    own[i][h] = WEIGHT::load8(matrix, first + row + 8 * h, in, 32 * at + lane % 4 * 8);
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int at = part + i * warps;
                if (at >= in / 32 || row + 8 * h >= rows) continue;
                __half *const to = y + (row + 8 * h) * (long long)in + 32 * at + lane % 4 * 8;
                *reinterpret_cast<uint4 *>(to) = WEIGHT::halves(own[i][h].codes, own[i][h].factors);
            }
    }
}
