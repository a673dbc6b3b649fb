// Fits the norms of tokens to what errors cost, once codes are chosen. Part of encode_rows.cu.

// A norm, and what the errors of its token cost with it.
struct Fitted {
    float norm, cost;
};

__device__ __forceinline__ float quotient(float numerator, float denominator) {
    return denominator > 0.0f ? numerator / denominator : 1.0f;
}

// a: a token, e: its error when it was rounded with the norm `size`. aa, ae, ee: a·Ma, a·Me, e·Me; a_mean, e_mean: a·μ,
// e·μ. plain: the norm of least squares, over `size`. root: √D.
__device__ __forceinline__ Fitted tilted(float aa, float ae, float ee, float a_mean, float e_mean, float plain,
                                         float root, float size) {
    // What is read back with this size is a − e. With another one, r times as large, the error is (1 − r)·a + r·e.
    const float lean_a = (aa - a_mean * a_mean) / root + a_mean, lean_e = (ae - a_mean * e_mean) / root + e_mean;
    const float with_a = aa - ae + lean_a * (lean_a - lean_e), with_e = ae - ee + lean_e * (lean_a - lean_e);
    const float ratio = fminf(fmaxf(quotient(with_a, with_a - with_e), TILT_LOW * plain), TILT_HIGH * plain);
    const float rest = 1.0f - ratio, lean = rest * lean_a + ratio * lean_e;
    return {fmaxf(ratio * size, 0.0f), rest * (rest * aa + 2.0f * ratio * ae) + ratio * ratio * ee + lean * lean};
}
