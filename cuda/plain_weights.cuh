// Weight formats: Python writes a struct for each that kernels read, from its file in `engine/weight_formats/`. WEIGHT
// is the struct of the format of a kernel's matrices. Its members:
//
//   Product                     the type in which tensor cores multiply weights: __half or __nv_bfloat16
//   PACKED                      whether it is in tiles: then the members of packed_weights.cuh are there as well
//   Eight                       8 neighbouring weights as they were loaded
//   load8(matrix, row, in, k)   loads an Eight: weights k … k + 7 of a row of `in`, k % 8 == 0, evicted first
//   floats(out, eight)          converts an Eight to 8 floats
//
// A matrix (out, in) is `const unsigned char *`, aligned to 16 bytes; rows follow each other unless it is packed.

// A format that is an array of T.
template <class T>
struct PlainWeights {
    using Product = T;
    using Eight = uint4;
    static constexpr bool PACKED = false;

    static __device__ __forceinline__ Eight load8(const unsigned char *matrix, int row, int in, int k) {
        const T *const weights = reinterpret_cast<const T *>(matrix) + row * (long long)in + k;
        return __ldcs(reinterpret_cast<const uint4 *>(weights));
    }
    static __device__ __forceinline__ void floats(float (&out)[8], const Eight &eight) {
        Chunk<T> chunk;
        *reinterpret_cast<uint4 *>(&chunk) = eight;
#pragma unroll
        for (int j = 0; j < 8; ++j) out[j] = to_float(chunk.at[j]);
    }
};
