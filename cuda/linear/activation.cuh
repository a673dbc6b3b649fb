// Activations. The define ACTIVATION names one of these functions; without it GATED is false.

#ifdef ACTIVATION
constexpr bool GATED = true;
#else
constexpr bool GATED = false;
#define ACTIVATION
#endif

// Each is a function of gate and up. Below −88, e^-gate is infinite and silu is −0.
__device__ __forceinline__ float silu(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

// gate/2 · (1 + tanh u) = gate / (1 + e^-2u), u = √(2/π) · (gate + 0.044715 gate³).
__device__ __forceinline__ float gelu_tanh(float gate, float up) {
    return gate / (1.0f + __expf(-1.5957691f * gate * (1.0f + 0.044715f * gate * gate))) * up;
}

__device__ __forceinline__ float gated_gelu(float gate, float up) {
    return 0.5f * gate * (1.0f + erff(0.70710678f * gate)) * up;
}

// For networks without a gate, whose gate and up are the same; NaN stays.
__device__ __forceinline__ float relu_squared(float gate, float up) { return (gate < 0.0f ? 0.0f : gate) * up; }
__device__ __forceinline__ float gelu(float gate, float up) { return 0.5f * gate * (1.0f + erff(0.70710678f * up)); }
__device__ __forceinline__ float plain_gelu_tanh(float gate, float up) { return gelu_tanh(gate, 1.0f); }

// gate / (1 + e^-1.702gate) · (up + 1) of gate of at most 7 and up within ±7; NaN stays.
__device__ __forceinline__ float swiglu_clamped(float gate, float up) {
    gate = gate > 7.0f ? 7.0f : gate;
    up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    return gate / (1.0f + __expf(-1.702f * gate)) * (up + 1.0f);
}

// For elementwise.cu alone.
__device__ __forceinline__ float gated(float x, float logit) { return x / (1.0f + __expf(-logit)); }
__device__ __forceinline__ float scaled(float x, float factor) { return factor == 0.0f ? 0.0f : x * factor; }
