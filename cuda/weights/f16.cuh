// Half precision.
struct f16 : PlainWeights<__half, __half> {};
