// The op `gated_delta` for a prompt, last part: norm and gate of the results, and inputs of the convolution.
//
// `delta_results`: y (rows, H, D) becomes RMSNorm(y) · norm · silu(z) of each head, norm (D,). A warp has a head of a
// row.
// Grid (ceil(rows · H / warps of a block)), block a multiple of 32.
//
// `delta_inputs`: inputs (WIDTH − 1 + N, C) of the slot get the inputs of tokens after the last complete block, after
// the inputs of the WIDTH − 1 tokens before them. end_inputs (n, WIDTH − 1, C): inputs of block b's last tokens are row
// kept[b], if that is not −1.
// Grid (ceil(C / block)), block any.
//
// projected, kept, rows, place: as for delta_blocks and delta_scan.
// DEFINES: KEY_DIM, VALUE_DIM, BLOCK, WIDTH.
// JOINS: delta.cuh.
// PRECOND: WIDTH − 1 <= BLOCK.
extern "C" __global__ void __launch_bounds__(256)
delta_results_kernel(float *y, const float *projected, const float *norm, long long pitch, int key_heads,
                     int value_heads, int rows, float eps) {
    const DeltaHeads heads = {key_heads, value_heads, 0};
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x / 32) + threadIdx.x / 32, row = i / value_heads;
    if (row >= rows) return;
    float *const own = y + i * VALUE_DIM;
    const float *const gate = projected + row * pitch + heads.gate(i % value_heads);
    write_gated(own, own, gate, norm, eps, [](float x) { return silu_of(x); });
}

extern "C" __global__ void __launch_bounds__(256)
delta_inputs_kernel(float *inputs, float *end_inputs, const float *projected, const int *end_rows, long long pitch,
                    int channels, int rows, int place) {
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    const ConvInputs conv_inputs = {inputs, projected, pitch, channels, place};
    const int complete = (place + rows) / BLOCK, current = complete * BLOCK;  // blocks; the token after them
    for (int block = 0; block < complete; ++block) {
        if (end_rows[block] < 0) continue;
        for (int back = 0; back < WIDTH - 1; ++back)
            end_inputs[(end_rows[block] * (WIDTH - 1LL) + back) * channels + channel] =
                conv_inputs.at((block + 1) * BLOCK - (WIDTH - 1) + back, channel);
    }
    // What is read of the slot lies after what has been written.
    for (int token = complete > 0 ? current - (WIDTH - 1) : place; token < place + rows; ++token)
        inputs[(token - current + WIDTH - 1) * static_cast<long long>(channels) + channel] =
            conv_inputs.at(token, channel);
}
