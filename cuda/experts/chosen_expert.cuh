// Products of each row with the matrices of the experts that were chosen for it. Part of gemv.cu and gemv_packed.cu.
//
// With EXPERTS, a launch has a grid of pairs in z, each a row and an expert, and more arguments: experts (pairs), their
// numbers; `sharing`, how many neighbouring pairs have the same row of x; `bias_pitch`, numbers from the bias of an
// expert to the next expert's. Pair p multiplies x[p / sharing]; its result is row p of y. weight has the rows of all
// experts, the first expert's rows first.
#ifndef EXPERTS
#define EXPERTS 0
#endif
#if EXPERTS
#define EXPERT_ARGUMENTS , const int *experts, int sharing, int bias_pitch

// Moves x, y and bias, which may be null, to the block's pair. Returns the first row of its expert's `size` rows of
// weights.
template <class X, class Y>
__device__ __forceinline__ int begin_pair(const X *&x, Y *&y, const float *&bias, const int *experts, int sharing,
                                          int bias_pitch, int in, int size, long long pitch) {
    wait_for_previous();  // the kernel before chose the experts
    const int expert = experts[blockIdx.z];
    x += blockIdx.z / sharing * (long long)in;
    y += blockIdx.z * pitch;
    if (bias) bias += expert * (long long)bias_pitch;
    return expert * size;
}
#else
#define EXPERT_ARGUMENTS
#endif
