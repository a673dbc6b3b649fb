// The op `short_conv`: y = C · (Σ_j conv[j] · u_j + bias) of the u = B · x of WIDTH tokens, channel by channel.
//
// y (rows, n). inputs (rows, 3n): [B | C | x]. conv (WIDTH, n), the oldest token's numbers first; bias (n,) or null.
// slots (slots, slot_rows, n): the u of blocks of tokens, after the u of the WIDTH − 1 tokens before each block.
// places int32 (rows, 4): 1 + slot, or 0; place in the block; 1 + slot of the next block, or 0; rows before this one
// that are the tokens before it. Such rows are computed again; rows of other tokens are in the slot.
// Grid (ceil(n / block), rows), block any. DEFINES: WIDTH.
// PRECOND: no two rows have the same slot and place.
extern "C" __global__ void __launch_bounds__(1024)
    short_conv_kernel(float *y, const float *inputs, const float *conv, const float *bias, float *slots,
                      const int *places, int n, int slot_rows) {
    let_next_begin();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const long long row = blockIdx.y;
    const int *const row_fields = places + 4 * row;
    const int slot = row_fields[0] - 1, place = row_fields[1], next = row_fields[2] - 1, rows_before = row_fields[3];
    const float *const in = inputs + row * 3 * n + i;
    const float newest = in[0] * in[2 * n];
    float *const at = slots + (static_cast<long long>(slot) * slot_rows + place + WIDTH - 1) * n + i;
    if (slot >= 0) {
        *at = newest;
        const int repeated = place - (slot_rows - 2 * (WIDTH - 1));
        if (next >= 0 && repeated >= 0) slots[(static_cast<long long>(next) * slot_rows + repeated) * n + i] = newest;
    }
    float sum = (bias ? bias[i] : 0.0f) + conv[(WIDTH - 1) * n + i] * newest;
    for (int j = 1; j < WIDTH; ++j) {
        const float *const earlier = in - 3LL * j * n;
        float u = 0.0f;
        if (rows_before >= j) {
            u = earlier[0] * earlier[2 * n];
        } else if (slot >= 0) {
            u = at[-static_cast<long long>(j) * n];
        }
        sum += conv[(WIDTH - 1 - j) * n + i] * u;
    }
    y[row * n + i] = in[n] * sum;
}
