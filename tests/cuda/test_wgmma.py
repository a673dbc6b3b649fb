"""Products of warpgroups read their operand in shared memory as the PTX ISA says: on the emulator, and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine.backends.cuda.device.kernel_source import _text, prelude
from tests.cuda.programs import Program, skip_without_wgmma

PLANTED = """
extern "C" __global__ void __launch_bounds__(128)
planted(float *out, const __half *a, const unsigned char *image, long long rest, int bytes, int offset) {
    DYNAMIC_SHARED(unsigned char, shared);
    unsigned char *const base = shared + (0u - shared_address(shared)) % 1024;
    for (int i = threadIdx.x; i < bytes; i += 128) base[i] = image[i];
    fence_async_proxy();
    __syncthreads();
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, tg = threadIdx.x % 4;
    unsigned own[4];
    for (int r = 0; r < 4; ++r)
        memcpy(own + r, a + (16 * warp + g + r % 2 * 8) * 16 + 2 * tg + r / 2 * 8, 4);
    float d[32];
    for (int i = 0; i < 32; ++i) d[i] = 1.0f;
    keep_here(d);
    wgmma_fence();
    wgmma_m64k16<ADDS>(d, own, rest | (shared_address(base + offset) / 16));
    wgmma_commit();
    wgmma_wait<0>();
    keep_here(d);
    for (int i = 0; i < 32; ++i)
        out[(16 * warp + g + i / 2 % 2 * 8) * 64 + 8 * (i / 4) + 2 * tg + i % 2] = d[i];
}
"""


# Product: each swizzle has an address of its own, from each place in a row of its pattern.
@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("adds", [0, 1])
@pytest.mark.parametrize(
    ("mode", "width", "s"), [(0, 16, 0), (3, 32, 0), (2, 64, 0), (2, 64, 1), (1, 128, 0), (1, 128, 3)]
)
def test_an_operand_lies_as_its_descriptor_says(
    rng: np.random.Generator, mode: int, width: int, s: int, adds: int
) -> None:
    """width: bytes of a row of the pattern of eight rows; s: which 32 bytes of it are read."""
    skip_without_wgmma()
    a, b = (rng.standard_normal((64, 16)).astype(np.float16) for _ in range(2))
    # Patterns have a gap between them. Without a swizzle a row has 16 bytes, and its other 16 are `leading` further.
    stride, leading = 1024 + 256 * (mode == 0), 128
    image = np.full((12 << 10) // 2, np.nan, np.float16)
    for row in range(64):
        for c in range(2):
            at = row % 8 * width + row // 8 * stride + s * 32 + c * (leading if mode == 0 else 16)
            at ^= (at // 128 % 8 % (width // 16)) * 16
            image[at // 2 : at // 2 + 8] = b[row, 8 * c : 8 * c + 8]
    rest = leading // 16 << 16 | stride // 16 << 32 | mode << 62
    out = np.full((64, 64), np.nan, np.float32)
    given = np.uint64(rest).astype(np.int64), np.int32(image.nbytes), np.int32(s * 32)
    text = f"#define ADDS {adds}\n{prelude()}{_text('wgmma.cuh')}{PLANTED}"
    Program(text).launch("planted", (1,), (128,), out, a, image.view(np.uint8), *given, shared=image.nbytes + 1024)
    exact = a.astype(np.float64) @ b.astype(np.float64).T + adds
    np.testing.assert_allclose(out, exact, atol=1e-5)
