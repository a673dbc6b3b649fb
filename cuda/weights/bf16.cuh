// Bfloat16.
struct bf16 : PlainWeights<__nv_bfloat16> {};
