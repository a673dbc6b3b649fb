// Products of the same x with two matrices of different packed formats in one launch. Part of gemv_packed.cu and
// gemm_wide.cu.
//
// With BESIDE, the second one's format, blocks (of gemv_packed) or tiles (of gemm_wide) from number `border` on
// multiply `beside` (beside_out, in), whose results are the columns of y after the first `out`; bias has both parts. A
// block multiplies one matrix, as in a launch for that matrix alone. There is no activation, and there are no experts.
// DEFINES: BESIDE (a packed format other than WEIGHT, or not defined); for gemv_packed BESIDE_UNIT, BESIDE_TILES,
// BESIDE_SLOTS.
#ifdef BESIDE
#define BESIDE_ARGUMENTS , const unsigned char *beside, int beside_out, int border
#else
#define BESIDE_ARGUMENTS
#endif
