"""Every kernel compiles for every architecture without spills, within the limits of shared memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polarlm.bench.gpu import nvrtc
from polarlm.bench.gpu.nvrtc import (
    SHARED_LIMIT,
    STATIC_LIMIT,
    Usage,
    architecture,
    compile_text,
    compiler,
    compilers,
    run_compiler,
)
from polarlm.engine.backends.cuda.device.kernel_source import OF_CUPY, OPTIONS, folder
from polarlm.engine.errors import EngineError
from tests.cuda.variants import VARIANTS, Variant, covering, everything, traits

# `make compile-all` compiles for every architecture. Here each stands for those that are like it: the oldest, one with
# little shared memory, and two newer ones.
LIKE = {80: 80, 86: 89, 87: 89, 89: 89, 90: 90, 100: 90, 103: 90, 110: 120, 120: 120, 121: 120}
COVERING = list({(str(variant), LIKE[arch]): (variant, LIKE[arch]) for variant, arch in covering()}.values())


@pytest.fixture(autouse=True)
def _needs_a_compiler() -> None:
    try:
        compiler()
    except EngineError as error:
        pytest.skip(str(error))


def faults(variant: Variant, usage: Usage) -> list[str]:
    """The faults of a compiled kernel, a sentence each."""
    shared = usage.static_shared + variant.dynamic_shared
    limit = SHARED_LIMIT[usage.arch]
    found = {
        f"spills {usage.spilled} bytes of registers": usage.spilled > 0,
        f"keeps {usage.stack} bytes of local memory": usage.stack > 0,
        f"has {usage.static_shared} bytes of static shared memory, of {STATIC_LIMIT}": usage.static_shared
        > STATIC_LIMIT,
        f"uses {shared} bytes of shared memory, of {limit}": shared > limit,
    }
    return [f"sm_{usage.arch} {variant}: {usage.kernel} {what}" for what, is_so in found.items() if is_so]


def row(variant: Variant, usage: Usage) -> str:
    shared = f"{usage.static_shared:6} + {variant.dynamic_shared:6}"
    return f"sm_{usage.arch:<4} {usage.registers:4} registers {shared} bytes shared  {usage.kernel:24} {variant}"


@pytest.mark.parametrize(("variant", "arch"), COVERING[:: len(COVERING) // 3], ids=str)
def test_some_variants_compile_within_the_limits(variant: Variant, arch: int) -> None:
    test_variants_compile_within_the_limits_of_each_architecture(variant, arch)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "arch"), COVERING, ids=lambda value: str(value).replace(" ", "-"))
def test_variants_compile_within_the_limits_of_each_architecture(variant: Variant, arch: int) -> None:
    compiled = compile_text(variant.text(), arch)
    assert compiled
    for usage in compiled:
        print(row(variant, usage))
        assert not faults(variant, usage)


WAITING = {file.stem for file in folder().rglob("*.cu") if "wait_for_previous();" in file.read_text(encoding="utf-8")}
OVERLAPPING = [(variant.overlapping(), arch) for variant, arch in COVERING if arch == 90 and variant.kernel in WAITING]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "arch"), OVERLAPPING, ids=lambda value: str(value).replace(" ", "-"))
def test_kernels_that_wait_for_the_launch_before_compile_as_well(variant: Variant, arch: int) -> None:
    test_variants_compile_within_the_limits_of_each_architecture(variant, arch)


# The texts are the same for every architecture.
OF_90 = [(variant, arch) for variant, arch in COVERING if arch == 90]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "arch"), OF_90, ids=lambda value: str(value).replace(" ", "-"))
def test_variants_compile_with_cuda_12_as_well(monkeypatch: pytest.MonkeyPatch, variant: Variant, arch: int) -> None:
    """Its registers are not ours to choose: what it spills costs time on few GPUs, and is no fault."""
    if len(compilers()) < 2:
        pytest.skip("needs CUDA 12 beside CUDA 13: pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12")
    older = compilers()[-1]
    monkeypatch.setattr(nvrtc, "compiler", lambda: older)
    for usage in compile_text(variant.text(), arch):
        print(row(variant, usage))
        assert not faults(variant, replace(usage, spilled=0, stack=0))


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "arch"), OF_90, ids=lambda value: str(value).replace(" ", "-"))
def test_variants_compile_with_the_options_and_headers_of_cupy(variant: Variant, arch: int) -> None:
    """Its own copies of CUDA's C++ headers come before those of the wheels."""
    core = pytest.importorskip("cupy._core.core", reason="CuPy is not installed")
    options = [*core.assemble_cupy_compiler_options(OPTIONS), *OF_CUPY, architecture(variant.text(), arch)]
    message, binary = run_compiler(variant.text(), options)
    assert binary, message


def test_options_are_those_that_cupy_adds() -> None:
    of_cupy = pytest.importorskip("cupy.cuda.compiler", reason="CuPy is not installed")
    text = Path(of_cupy.__file__).read_text(encoding="utf-8")
    assert all(f"options += ('{option}',)" in text for option in OF_CUPY)


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["f16", "bf16"])
def test_gemv_of_one_row_keeps_its_loads_in_registers(weight: str) -> None:
    """The variant with the fewest registers to spare: a few more would spill loads in flight."""
    variants = [v for v in VARIANTS["gemv"] if v.defines["WEIGHT"] == weight and v.defines["ROWS"] == 1]
    tight = [v for v in variants if v.defines["NORMED"] and not v.defines["ADD"] and "ACTIVATION" not in v.defines]
    assert len(tight) == 4
    for variant in tight:
        test_variants_compile_within_the_limits_of_each_architecture(variant, 90)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "arch"),
    [
        ("polarquant/turbo2 D128 N128 mean8", 90),
        ("polarquant/turbo2 D128 N128 mean8", 120),
        ("turbo2/ring3.5 D128 N128 mean8", 86),
        ("ring3/ring5 D256 N64 mean8", 80),
        ("ring4/ring3 D256 N64 mean8", 90),
    ],
)
def test_an_encoder_of_parts_of_blocks_keeps_its_registers(cache: str, arch: int) -> None:
    """The variants with the fewest to spare."""
    (tight,) = (variant for variant in VARIANTS["encode_blocks"] if str(variant.cache) == cache)
    test_variants_compile_within_the_limits_of_each_architecture(tight, arch)


def test_every_kernel_has_variants() -> None:
    assert set(VARIANTS) == {file.stem for file in folder().rglob("*.cu")}


def test_the_covering_set_covers_and_stays_small() -> None:
    assert len(COVERING) <= len(VARIANTS) * len(SHARED_LIMIT) + 30
    kernels_and_archs = {(variant.kernel, arch) for variant, arch in COVERING}
    assert kernels_and_archs == {(variant.kernel, LIKE[arch]) for variant, arch in everything()}
    covered = [trait for variant, _ in COVERING for trait in traits(variant)]
    assert set(covered) == {trait for variant, _ in everything() for trait in traits(variant)}


@pytest.mark.parametrize(
    "kernel",
    [
        *("gemv_packed", "gemm_packed", "gemm_small", "prefill_attention", "decode_attention"),
        *("gated_delta", "delta_blocks", "delta_scan"),
    ],
)
def test_a_kernel_does_not_compile_with_other_bytes_of_shared_memory(kernel: str) -> None:
    variant = VARIANTS[kernel][0]
    more = replace(variant, defines={**variant.defines, "SHARED": int(variant.defines["SHARED"]) + 16})
    with pytest.raises(EngineError, match="static assertion failed"):
        compile_text(more.text(), 90)


def test_a_compile_error_names_file_and_line() -> None:
    with pytest.raises(EngineError, match=r"cuda/planted\.cu\(7\): error"):
        compile_text('#line 7 "cuda/planted.cu"\nnonsense;', 80)
