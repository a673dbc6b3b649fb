"""Which GPUs attend with products of warpgroups, and how their kernel is compiled and launched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from polarlm.engine.backends.cuda.device import wgmma
from polarlm.engine.backends.cuda.ops import CudaOps
from tests.cuda.fake_cupy import Machine
from tests.cuda.test_cupy_device import imported
from tests.cuda.test_prefill_wgmma import attend_by


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Machine, ModuleType]]:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    with imported(monkeypatch) as both:
        yield both


@pytest.mark.parametrize(
    ("asked", "capability", "has_it"),
    [("1", (9, 0), True), ("0", (9, 0), False), (None, (9, 0), False), ("1", (8, 9), False), ("1", (10, 0), False)],
)
def test_it_takes_the_variable_and_the_gpu(
    fake: tuple[Machine, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    asked: str | None,
    capability: tuple[int, int],
    has_it: bool,
) -> None:
    """No GPU has run these kernels, so they are off unless they are asked for."""
    machine, module = fake
    machine.capability = capability
    if asked is None:
        monkeypatch.delenv(wgmma.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(wgmma.VARIABLE, asked)
    assert module.CupyDevice().wgmma == has_it


def test_a_prompt_is_attended_to_by_the_kernel_for_its_heads(
    fake: tuple[Machine, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The results of both kernels are the same but for roundings. What is compiled for sm_90a is kept."""
    machine, module = fake
    monkeypatch.setenv(wgmma.VARIABLE, "1")
    for _ in range(2):
        found = attend_by(CudaOps(module.CupyDevice()))
    assert machine.launches.count("prefill_wgmma_kernel") == 2
    ((*options, architecture),) = machine.options
    assert architecture == "--gpu-architecture=sm_90a"
    assert "-ftz=true" in options
    assert [file.suffix for file in tmp_path.iterdir()] == [".cubin"]
    monkeypatch.setenv(wgmma.VARIABLE, "0")
    other = attend_by(CudaOps(module.CupyDevice()))
    assert machine.launches.count("prefill_attention_kernel") == 1
    np.testing.assert_allclose(found, other, atol=4e-3)


def test_an_error_of_the_compiler_says_where(fake: tuple[Machine, ModuleType], tmp_path: Path) -> None:
    device = fake[1].CupyDevice()
    with pytest.raises(RuntimeError, match=r"kernel\.cu\(1\): error"):
        device.launch("planted", "// TARGET: sm_90a.\n#error", (1,), (32,), ())
    assert not list(tmp_path.iterdir())
