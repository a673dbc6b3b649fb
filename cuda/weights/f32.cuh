// Float32. Tensor cores multiply it in half precision: what is too large for that becomes its largest number.
struct f32 : PlainWeights<float, __half> {};
