// What kernels of products write to y, and which rows of weights a block multiplies.
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
