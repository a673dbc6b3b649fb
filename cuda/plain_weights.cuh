// Weight formats, each a struct in `cuda/weights/` that is called like its twin in `engine/weight_formats/`; WEIGHT is
// the one that a kernel reads. What such a struct has:
//
//   Product                     __half, or __nv_bfloat16 for a plain format: tensor cores multiply its values as that
//   PLAIN                       whether a matrix is Product after Product
//   Eight                       what a load of 8 neighbours is, until their values are wanted
//   load8(matrix, row, in, k)   → Eight: the values k to k + 7 of a row of `in`, k % 8 == 0; memory that is read once
//   floats(out, eight)          the 8 values
//
// A matrix (out, in) is `const unsigned char *`, aligned to 16 bytes.

// Numbers of type T, one after the other.
template <class T, class P>
struct PlainWeights {
    using Product = P;
    static constexpr bool PLAIN = sizeof(T) == sizeof(P);
    static constexpr int LOADS = 8 * sizeof(T) / 16;
    struct Eight {
        uint4 words[LOADS];
    };

    static __device__ __forceinline__ Eight load8(const unsigned char *matrix, int row, int in, int k) {
        const uint4 *const from = reinterpret_cast<const uint4 *>(reinterpret_cast<const T *>(matrix) + row * (long long)in + k);
        Eight eight;
#pragma unroll
        for (int i = 0; i < LOADS; ++i) eight.words[i] = __ldcs(from + i);
        return eight;
    }
    static __device__ __forceinline__ void floats(float (&out)[8], const Eight &eight) {
        constexpr int size = 16 / sizeof(T);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            Chunk<T> chunk;
            *reinterpret_cast<uint4 *>(&chunk) = eight.words[i];
#pragma unroll
            for (int j = 0; j < size; ++j) out[i * size + j] = to_float(chunk.at[j]);
        }
    }
};
