// Products of the same x with two matrices of different packed formats in one launch. Part of gemv_packed.cu and
// gemm_wide.cu.
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
