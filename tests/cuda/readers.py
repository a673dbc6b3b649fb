"""Kernels around the device's codecs, which read a record, or write one from vectors or codes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from polarlm.engine.backends.cuda.device.kernel_source import with_readers
from polarlm.engine.records import ROW_BYTES, Layout
from tests.cuda.programs import Program

# out (PARTS, TILES, 32, 4) words, in the order of f16; norms (PARTS, 32, 2 · PT), means (STEPS, 32, 2), a scale (1).
READ = """#line 2 "cuda/read.cu"
extern "C" __global__ void __launch_bounds__(256) read_kernel(
    unsigned *out, float *norms, unsigned *means, float *scale, const unsigned char *record,
    const unsigned char *tables) {
    using Codec = SIDE;
    DYNAMIC_SHARED(unsigned char, shared);
    unsigned char *own = shared + LAYOUT::VALUES * (ROW_BYTES / 2);
    copy_tables<Codec, 64>(own, tables);
    __syncthreads();
    const int lane = threadIdx.x % 32;
    for (int part = threadIdx.x / 32; part < LAYOUT::PARTS; part += blockDim.x / 32) {
        typename Codec::Codes codes;
        codes.load(record, part, lane);
        typename Codec::Decoder decoder(codes, own, lane);
#pragma unroll
        for (int t = 0; t < LAYOUT::TILES; ++t) {
            unsigned a[4];
            decoder.next(t, a);
#pragma unroll
            for (int r = 0; r < 4; ++r) out[((part * LAYOUT::TILES + t) * 32 + lane) * 4 + f16_order(r)] = a[r];
        }
        float norm[2 * LAYOUT::PT];
        Codec::norms(norm, record, part, lane, own);
#pragma unroll
        for (int i = 0; i < 2 * LAYOUT::PT; ++i) norms[(part * 32 + lane) * 2 * LAYOUT::PT + i] = norm[i];
    }
    if (threadIdx.x < 32) {
        for (int s = 0; s < LAYOUT::STEPS; ++s) {
            unsigned mean[2];
            mean_tile<LAYOUT>(mean, record, s, lane % 4);
            means[(s * 32 + lane) * 2] = mean[0], means[(s * 32 + lane) * 2 + 1] = mean[1];
        }
        if (lane == 0) *scale = mean_scale<LAYOUT>(record);
    }
}
"""

# codes [N][D / WIDTH] and norms [N] to a record.
PACK = """#line 2 "cuda/pack.cu"
extern "C" __global__ void __launch_bounds__(256) pack_kernel(
    unsigned char *record, const unsigned short *codes, const float *norms, const unsigned char *tables) {
    DYNAMIC_SHARED(float, shared_norms);
    unsigned short *shared_codes = reinterpret_cast<unsigned short *>(shared_norms + LAYOUT::N);
    for (int i = threadIdx.x; i < LAYOUT::N; i += blockDim.x) shared_norms[i] = norms[i];
    for (int i = threadIdx.x; i < LAYOUT::N * LAYOUT::D / SIDE::WIDTH; i += blockDim.x) shared_codes[i] = codes[i];
    __syncthreads();
    SIDE::pack(record, shared_codes, shared_norms, tables, threadIdx.x, blockDim.x);
}
"""

# x [N][D] to a record, for a codec that rounds by itself.
ENCODE = """#line 2 "cuda/encode.cu"
extern "C" __global__ void __launch_bounds__(256) encode_kernel(
    unsigned char *record, const float *x, const unsigned char *tables) {
    DYNAMIC_SHARED(float, shared);
    for (int i = threadIdx.x; i < LAYOUT::N * LAYOUT::D; i += blockDim.x) shared[i] = x[i];
    __syncthreads();
    SIDE::encode(record, shared, nullptr, tables, threadIdx.x, blockDim.x);
}
"""


def text(kernel: str, layout: Layout) -> str:
    """The text of one of the kernels above for the side that `layout` is of."""
    if layout.record.geometry.values:
        return with_readers(kernel, values=layout, SIDE="ValueCodec", LAYOUT="ValueLayout")
    return with_readers(kernel, keys=layout, SIDE="KeyCodec", LAYOUT="KeyLayout")


def read(layout: Layout, record: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A record read by the device: values (N, D) float16 and norms (N,) float32, and the mean (D,) float32."""
    shape = layout.record.geometry
    out = np.full((shape.parts, shape.tiles, 32, 4), 0xFFFFFFFF, np.uint32)
    norms = np.full((shape.parts, 32, shape.part // 8), np.nan, np.float32)
    means, scale = np.full((shape.padded // 16, 32, 2), 0xFFFFFFFF, np.uint32), np.full(1, np.nan, np.float32)
    args = (out, norms, means, scale, record, layout.tables)
    shared = max(ROW_BYTES * layout.record.rows, 128)
    Program(text(READ, layout)).launch("read_kernel", (1,), (64,), *args, shared=shared, seed=seed)
    values = undone(shape.halves, (shape.block_size, shape.head_dim), out.view(np.float16).reshape(-1))
    by_row = norms.reshape(shape.parts, 8, 4, -1)  # the lanes of a row have the same norms
    assert (by_row == by_row[:, :, :1]).all()
    mean = means[:, :4].view(np.float16).swapaxes(0, 1)  # lanes 0 to 3: (4, STEPS, 4)
    own_norms = undone(shape.tokens, (shape.block_size,), by_row[:, :, 0].reshape(-1))
    return values, own_norms, undone(shape.channels, (shape.head_dim,), mean.reshape(-1)) * scale


def undone(order: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...], x: np.ndarray) -> np.ndarray:
    """x as `order` orders an array of this shape, fillings left out → the array."""
    numbers = order(np.arange(1, np.prod(shape) + 1).reshape(shape))
    found = np.zeros(numbers.max() + 1, x.dtype)
    found[numbers] = x
    return found[1:].reshape(shape)
