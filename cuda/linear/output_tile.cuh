// What kernels of products write to y, which rows of weights a block multiplies, and two matrices in one launch.
// TO: the type of y, float if it is not defined; halves are clipped to ±65504, NaN stays.
#ifndef TO
#define TO float
#endif

// The rows of weights that a block multiplies; c is a row's number among these.
struct Tile {
    int first, out;  // first column of y; columns of y in all

    __device__ __forceinline__ int column_of(int c) const { return first + (GATED ? c / 32 * 16 + c % 16 : c); }
    __device__ __forceinline__ int row_of(int c) const {
        return min(column_of(c), out - 1) + (GATED && c % 32 >= 16 ? out : 0);
    }
};

// *at = sum, or += with ADD.
__device__ __forceinline__ void store(TO *at, float sum) {
    *at = from_float<TO>(within<TO>(ADD ? to_float(*at) + sum : sum));
}

// Products of the same x with two matrices of different packed formats in one launch of gemv_packed.cu or gemm_wide.cu.
//
// With SECOND, the second one's format, blocks (of gemv_packed) or tiles (of gemm_wide) from number `border` on
// multiply `second` (second_out, in), whose results are the columns of y after the first `out`; bias has both parts. A
// block multiplies one matrix, as in a launch for that matrix alone. There is no activation, and there are no experts.
// DEFINES: SECOND (a packed format other than WEIGHT, or not defined); for gemv_packed SECOND_UNIT, SECOND_TILES,
// SECOND_SLOTS.
#ifdef SECOND
#define SECOND_ARGUMENTS , const unsigned char *second, int second_out, int border
#else
#define SECOND_ARGUMENTS
#endif
