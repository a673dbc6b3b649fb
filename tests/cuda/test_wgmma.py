"""Products of warpgroups: operands lie as the PTX ISA says, the emulator finds missing waits and fences, and texts for
one architecture compile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polarlm.engine.backends.cuda.device.kernel_source import _text, prelude
from polarlm.engine.errors import EngineError
from tests.cuda.nvrtc import compile_text
from tests.cuda.programs import Program, on_gpu
from tests.cuda.test_cupy_device import imported
from tests.cuda_emulator import EmulatorError

PLANTED = """
extern "C" __global__ void __launch_bounds__(128)
planted_kernel(float *out, const __half *a, const unsigned char *image, long long rest, int bytes, int offset) {
    DYNAMIC_SHARED(unsigned char, shared);
    unsigned char *const base = shared + (0u - shared_address(shared)) % 1024;
    for (int i = threadIdx.x; i < bytes; i += 128) base[i] = image[i];
    fence_async_proxy();
    __syncthreads();
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, tg = threadIdx.x % 4;
    unsigned rows[4];
    for (int r = 0; r < 4; ++r)
        memcpy(rows + r, a + (16 * warp + g + r % 2 * 8) * 16 + 2 * tg + r / 2 * 8, 4);
    float d[32];
    for (int i = 0; i < 32; ++i) d[i] = 1.0f;
    keep_here(d);
    wgmma_fence();
    wgmma_m64k16<SUMS_START != 0>(d, rows, rest | (shared_address(base + offset) / 16));
    wgmma_commit();
    wgmma_wait<0>();
    keep_here(d);
    for (int i = 0; i < 32; ++i)
        out[(16 * warp + g + i / 2 % 2 * 8) * 64 + 8 * (i / 4) + 2 * tg + i % 2] = d[i];
}
"""


def planted(kernel: str = PLANTED, adds: int = 0) -> str:
    return f"#define SUMS_START {adds}\n{prelude()}{_text('wgmma.cuh')}{kernel}"


def multiply(rng: np.random.Generator, text: str, mode: int, width: int, s: int) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's product, and float64's. width: bytes of a row of the swizzle's pattern of eight rows; s: which 32
    bytes of it are read."""
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
    numbers = np.uint64(rest).astype(np.int64), np.int32(image.nbytes), np.int32(s * 32)
    Program(text).launch(
        "planted_kernel", (1,), (128,), out, a, image.view(np.uint8), *numbers, shared=image.nbytes + 1024
    )
    return out, a.astype(np.float64) @ b.astype(np.float64).T


@pytest.mark.parametrize(
    ("mode", "width", "s", "adds"), [(0, 16, 0, 0), (3, 32, 0, 1), (2, 64, 1, 0), (1, 128, 0, 1), (1, 128, 3, 0)]
)
def test_an_operand_lies_as_its_descriptor_says(
    rng: np.random.Generator, mode: int, width: int, s: int, adds: int
) -> None:
    if on_gpu(unless=(9, 0)):
        pytest.skip("needs a GPU of compute capability 9.0")
    out, exact = multiply(rng, planted(adds=adds), mode, width, s)
    np.testing.assert_allclose(out, exact + adds, atol=1e-5)


@pytest.mark.skipif(on_gpu(), reason="a GPU does not say what is missing")
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("    wgmma_wait<0>();\n", "", "not been waited for|under way|race"),
        ("    wgmma_wait<0>();\n", "    d[0] = 1.0f;\n    wgmma_wait<0>();\n", "sums of a product have changed"),
        ("    wgmma_commit();\n", "", "not been waited for|under way"),
        ("    keep_here(d);\n    wgmma_fence();\n", "", "without a wgmma_fence"),
        ("    fence_async_proxy();\n", "", "no fence.proxy.async after the store"),
        ("    __syncthreads();\n", "", "race|uninitialised"),
    ],
)
def test_the_emulator_finds_a_missing_wait_or_fence(rng: np.random.Generator, old: str, new: str, words: str) -> None:
    assert PLANTED.count(old) == 1
    with pytest.raises(EmulatorError, match=words):
        multiply(rng, planted(PLANTED.replace(old, new)), 1, 128, 0)


def test_the_text_compiles_for_its_architecture() -> None:
    """For sm_90a, which has these products, though the compiler is asked for 90."""
    try:
        (usage,) = compile_text(planted(), 90)
    except EngineError as error:
        pytest.skip(str(error))
    assert (usage.kernel, usage.arch, usage.spilled) == ("planted_kernel", 90, 0)


def test_cupy_loads_a_file_compiled_for_the_architecture_which_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    text = "// TARGET: sm_90a.\n" + 'extern "C" __global__ void planted_kernel(int *x) { *x = 3; }'
    with imported(monkeypatch) as (machine, module):
        for _ in range(2):
            device = module.CupyDevice()
            x = device.empty((1,), np.int32)
            device.launch("planted_kernel", text, (1,), (1,), (x,))
            assert device.to_host(x)[0] == 3
        ((*options, architecture),) = machine.options
        assert architecture == "--gpu-architecture=sm_90a"
        assert "-ftz=true" in options
        assert [file.suffix for file in tmp_path.iterdir()] == [".cubin"]
        with pytest.raises(RuntimeError, match=r"kernel\.cu\(1\): error"):
            device.launch("planted_kernel", "// TARGET: sm_90a.\n#error", (1,), (32,), ())
