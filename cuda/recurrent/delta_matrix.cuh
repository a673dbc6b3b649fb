// How a block of a step shares out a head's matrix (KEY_DIM, VALUE_DIM): a thread has 4 columns and every GROUPS-th
// row. It holds HELD of them in registers.

constexpr int COLUMNS = VALUE_DIM / 4;  // threads of a row
constexpr int GROUPS = THREADS / COLUMNS < KEY_DIM ? THREADS / COLUMNS : KEY_DIM;
constexpr int OWN = (KEY_DIM + GROUPS - 1) / GROUPS, HELD = OWN < 8 ? OWN : 8;  // rows of a thread
static_assert(GROUPS > 0, "a row has a thread for every 4 columns");

// Rows start … start + HELD − 1 of a thread's own rows of `matrix`; rows that there are not are 0.
__device__ __forceinline__ void load_rows(float (&rows)[HELD][4], const float *matrix, int group, int start,
                                          int column) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int row = (start + i) * GROUPS + group;
        if (row < KEY_DIM) {
            load_floats(rows[i], matrix + row * VALUE_DIM + column);
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) rows[i][e] = 0.0f;
        }
    }
}
