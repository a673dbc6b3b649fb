// Half precision.
struct f16 : PlainWeights<__half> {};
