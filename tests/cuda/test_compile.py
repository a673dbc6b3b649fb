"""Every kernel compiles for every architecture without spills, within the limits of shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from polarlm.engine.backends.cuda.device.kernel_source import OPTIONS, folder
from polarlm.engine.errors import EngineError
from tests.cuda import nvrtc
from tests.cuda.nvrtc import (
    OF_CUPY,
    SHARED_LIMIT,
    STATIC_LIMIT,
    Usage,
    compile_text,
    compiler,
    compilers,
    run_compiler,
)
from tests.cuda.variants import VARIANTS, Variant, covering, everything, traits
from tests.pairs import mostly_slow

# `make compile-all` compiles for every architecture. Here each stands for those that are like it: the oldest, one with
# little shared memory, and two newer ones.
LIKE = {80: 80, 86: 89, 87: 89, 89: 89, 90: 90, 100: 90, 103: 90, 110: 90, 120: 120, 121: 120}


def thinned() -> Iterator[tuple[Variant, int]]:
    """Every kernel for every kind of GPU, and every trait once."""
    seen: set[tuple[str, int] | tuple[str, str]] = set()
    for variant, arch in covering():
        like = LIKE[arch] if variant.dynamic_shared <= SHARED_LIMIT[LIKE[arch]] else 80
        new = {(variant.kernel, like), *traits(variant)} - seen
        if new:
            seen |= new
            yield variant, like


COVERING = [*thinned()]


@pytest.fixture(autouse=True)
def _needs_a_compiler() -> None:
    try:
        compiler()
    except EngineError as error:
        pytest.skip(str(error))


def faults(variant: Variant, usage: Usage) -> list[str]:
    shared = usage.static_shared + variant.dynamic_shared
    limit = SHARED_LIMIT[usage.arch]
    kinds = {
        f"spills {usage.spilled} bytes of registers": usage.spilled > 0,
        f"keeps {usage.stack} bytes of local memory": usage.stack > 0,
        f"has {usage.static_shared} bytes of static shared memory, of {STATIC_LIMIT}": usage.static_shared
        > STATIC_LIMIT,
        f"uses {shared} bytes of shared memory, of {limit}": shared > limit,
    }
    return [f"sm_{usage.arch} {variant}: {usage.kernel} {what}" for what, is_so in kinds.items() if is_so]


def row(variant: Variant, usage: Usage) -> str:
    shared = f"{usage.static_shared:6} + {variant.dynamic_shared:6}"
    return f"sm_{usage.arch:<4} {usage.registers:4} registers {shared} bytes shared  {usage.kernel:24} {variant}"


def check(variant: Variant, arch: int) -> None:
    compiled = compile_text(variant.text(), arch)
    assert compiled
    for usage in compiled:
        print(row(variant, usage))
        assert not faults(variant, usage)


WAITING = {file.stem for file in folder().rglob("*.cu") if "wait_for_previous();" in file.read_text(encoding="utf-8")}


@mostly_slow("variant, arch", COVERING, COVERING[:: len(COVERING) // 3][:4], ids=lambda of: str(of).replace(" ", "-"))
def test_variants_compile_within_the_limits_of_each_architecture(variant: Variant, arch: int) -> None:
    """Exhaustive: every kernel for every kind of GPU, with every codec and head dim, compiled once. For sm_90 kernels
    that may overlap with the launch before them are compiled as they are launched there, with waits."""
    check(variant.overlapping() if arch == 90 and variant.kernel in WAITING else variant, arch)


# The variants with the fewest registers to spare: a few more would spill loads in flight.
TIGHT_CACHES = [
    ("polarquant/turbo2 D128 N128 mean8", 90),
    ("turbo2/ring3.5 D128 N128 mean8", 86),
    ("ring3/ring5 D256 N64 mean8", 80),
    ("ring4/ring3 D256 N64 mean8", 90),
]


@pytest.mark.slow
def test_the_variants_with_the_fewest_registers_to_spare_compile() -> None:
    """They are not in the covering set: products of one row after a norm, and encoders of parts of blocks."""
    gemv = [v for v in VARIANTS["gemv"] if v.defines["ROWS"] == 1 and v.defines["NORMED"] and v.defines["SPLIT"] == 1]
    gemv = [v for v in gemv if not v.defines["ADD"] and "ACTIVATION" not in v.defines]
    encoders = {str(variant.cache): variant for variant in VARIANTS["encode_blocks"]}
    assert gemv
    for variant, arch in [*((v, 90) for v in gemv), *((encoders[cache], arch) for cache, arch in TIGHT_CACHES)]:
        check(variant, arch)


# Those of the widest heads have no register to spare; what is kept in registers depends on the architecture.
WIDE = [v for v in VARIANTS["prefill_attention"] if v.cache is not None and v.cache.head_dim == 256]
ONE = next(v for v in WIDE if v.cache is not None and (v.cache.keys, v.cache.values) == ("ring3", "turbo2"))


@mostly_slow(
    "variant, arch", product(WIDE, (80, 89, 90, 100, 120)), [(ONE, 120)], ids=lambda of: str(of).replace(" ", "-")
)
def test_prompts_with_the_widest_heads_compile(variant: Variant, arch: int) -> None:
    check(variant, arch)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", VARIANTS)
def test_a_variant_of_each_kernel_compiles_with_cuda_12_and_with_the_headers_of_cupy(
    monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """CuPy's own copies of CUDA's C++ headers come before the headers of the wheels. Every kernel has code of its own,
    which another compiler may refuse; how many registers it takes there is not ours to choose."""
    core = pytest.importorskip("cupy._core.core", reason="CuPy is not installed")
    text = VARIANTS[kernel][0].text()
    options = [*core.assemble_cupy_compiler_options(OPTIONS), *OF_CUPY, "--gpu-architecture=sm_90"]
    for installed in compilers():
        monkeypatch.setattr(nvrtc, "compiler", lambda installed=installed: installed)
        message, binary = run_compiler(text, options)
        assert binary, message


def test_options_are_those_that_cupy_adds() -> None:
    of_cupy = pytest.importorskip("cupy.cuda.compiler", reason="CuPy is not installed")
    text = Path(of_cupy.__file__).read_text(encoding="utf-8")
    assert all(f"options += ('{option}',)" in text for option in OF_CUPY)


def test_every_kernel_has_variants() -> None:
    assert set(VARIANTS) == {file.stem for file in folder().rglob("*.cu")}


def test_the_covering_set_covers_and_stays_small() -> None:
    assert len(COVERING) <= 6 * len(VARIANTS)
    kernels_and_archs = {(variant.kernel, arch) for variant, arch in COVERING}
    assert kernels_and_archs == {(variant.kernel, LIKE[arch]) for variant, arch in everything()}
    covered = [trait for variant, _ in COVERING for trait in traits(variant)]
    assert set(covered) == {trait for variant, _ in everything() for trait in traits(variant)}


SIZED = [
    "gemv_packed",
    "gemm_wide",
    "prefill_attention",
    "decode_attention",
    "encode_blocks",
    "encode_rows",
    "delta_scan",
]


@pytest.mark.parametrize("kernel", SIZED)
def test_a_kernel_does_not_compile_with_other_bytes_of_shared_memory(kernel: str) -> None:
    variant = VARIANTS[kernel][0]
    more = replace(variant, defines={**variant.defines, "SHARED": int(variant.defines["SHARED"]) + 16})
    with pytest.raises(EngineError, match="static assertion failed"):
        compile_text(more.text(), 90)


def test_a_compile_error_names_file_and_line() -> None:
    with pytest.raises(EngineError, match=r"cuda/planted\.cu\(7\): error"):
        compile_text('#line 7 "cuda/planted.cu"\nnonsense;', 80)
