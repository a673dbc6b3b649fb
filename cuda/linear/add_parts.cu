// Adds the sums that parts of a product have written, in their order, then bias: the end of gemm_wide.cu.
//
// parts (count, rows, width) float; width: out, with an ACTIVATION (GATED) 2 · out. y: rows of `out` numbers, `pitch`
// numbers apart. bias (width) or null.
// Grid (ceil(rows · out / block)), block any.
// DEFINES: ADD (0 or 1), ACTIVATION (a function of activation.cuh, or not defined), TO (type of y, see
// output_tile.cuh).
// JOINS: activation.cuh, output_tile.cuh.
// PRECOND: none.
extern "C" __global__ void __launch_bounds__(1024)
add_parts_kernel(TO *y, const float *parts, const float *bias, int count, int rows, int out, long long pitch) {
    let_next_begin();
    wait_for_previous();
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= (long long)rows * out) return;
    const int width = GATED ? 2 * out : out;
    const auto product = [&](int column) {
        float total = 0.0f;
        for (int part = 0; part < count; ++part) total += parts[(part * (long long)rows + i / out) * width + column];
        return bias ? total + bias[column] : total;
    };
    float total = product(i % out);
    if (GATED) total = ACTIVATION(total, product(out + i % out));
    store(y + i / out * pitch + i % out, total);
}
