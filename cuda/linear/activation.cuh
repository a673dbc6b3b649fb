// Activations. The define ACTIVATION names one of these functions; without it GATED is false.

#ifdef ACTIVATION
constexpr bool GATED = true;
#else
constexpr bool GATED = false;
#define ACTIVATION
#endif

// Below −88, e^-x is infinite and silu is −0.
__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

// x/2 · (1 + tanh u) = x / (1 + e^-2u), u = √(2/π) · (x + 0.044715 x³).
__device__ __forceinline__ float gelu_tanh(float x) {
    return x / (1.0f + __expf(-1.5957691f * x * (1.0f + 0.044715f * x * x)));
}
