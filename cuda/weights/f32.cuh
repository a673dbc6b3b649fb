// Float32. Tensor cores multiply it in half precision; values beyond ±65504 are clipped to that.
struct f32 : PlainWeights<float, __half> {};
