// Products of groups of rows with the matrices of their experts. Part of gemm_wide.cu.
//
// With EXPERTS, a launch has a grid of groups in z, and more arguments: groups, as group_pairs.cu writes them;
// `places_rows`, the row of x of each place, or null where x has a row for each place; `bias_pitch`, numbers from the
// bias of an expert to the next expert's. The product of a place is in that row of y. weight has the rows of all
// experts, the first expert's rows first. The grid has one part in y.
#ifndef EXPERTS
#define EXPERTS 0
#endif

// The rows of x that a block multiplies: all of a launch, or its group's.
struct Rows {
    int first_weight, count;  // first_weight: the number of the first row of weights
#if EXPERTS
    const int *place_rows;
    int first_place;
    __device__ __forceinline__ int operator[](int row) const {
        return place_rows ? place_rows[first_place + row] : first_place + row;
    }
#else
    __device__ __forceinline__ int operator[](int row) const { return row; }
#endif
};

#if EXPERTS
#define GROUP_ARGUMENTS , const int *groups, const int *places_rows, int bias_pitch

// The rows of the block's group. Moves y and bias, which may be null, to the group's; each expert has `size`
// rows of weights.
template <class Y>
__device__ __forceinline__ Rows rows_of_group(Y *&y, const float *&bias, const int *groups, const int *places_rows,
                                              int bias_pitch, int size, long long pitch) {
    wait_for_previous();  // a kernel before made the groups
    const int *const group = groups + 3 * blockIdx.z;
    y += group[1] * pitch;
    if (bias) bias += group[0] * (long long)bias_pitch;
    return {group[0] * size, group[2], places_rows, group[1]};
}
#else
#define GROUP_ARGUMENTS
#endif
