"""Which level of CPU features is chosen, and what happens where kernels do not work."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.native import self_test
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.select import select
from polarlm.engine.errors import EngineError
from polarlm.engine.jit.compile import library, target
from polarlm.engine.jit.compile.compiler import Kernel, compile_object
from polarlm.engine.jit.compile.target import VARIABLE, host_features, levels
from polarlm.engine.jit.isa.levels import LEVELS, Level
from tests.compiled import end_of_compilation
from tests.jit.levels import Narrow
from tests.ops.attending import Sequence_, Shape, case_of
from tests.ops.backends import native
from tests.programs import ROOT


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch):
    """Choices are made again, and the kernels of these tests are forgotten. None of an earlier test is compiled."""
    end_of_compilation()
    monkeypatch.delenv(VARIABLE, raising=False)
    self_test._first_that_works.cache_clear()
    yield
    self_test._first_that_works.cache_clear()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch):
    """Makes the compilation of the kernels of some levels fail, in this test only."""

    def fail(names: set[str], why: Exception) -> None:
        def compiled(kernel: Kernel, level: Level) -> bytes:
            if level.name in names:
                raise why
            return compile_object(kernel, level)

        monkeypatch.setattr(library, "compile_object", compiled)
        libraries = {level: library.Library(level, None) for level in LEVELS}
        monkeypatch.setattr("polarlm.engine.backends.native.launch.library", lambda level, sources: libraries[level])

    return fail


def test_a_level_with_a_missing_feature_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_may_use_tiles", lambda: True)
    everything = frozenset(feature for other in LEVELS for feature in other.needs)
    for level, missing in [(each, feature) for each in LEVELS for feature in each.needs]:
        monkeypatch.setattr(target, "machine", lambda level=level: level.machine)
        monkeypatch.setattr(target, "host_features", lambda missing=missing: everything - {missing})
        assert level not in target.levels()
        assert not any(missing in other.needs for other in target.levels())
        monkeypatch.setenv(VARIABLE, level.name)
        with pytest.raises(EngineError):
            target.permitted_levels()


def test_every_level_is_found_where_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No level of another machine is, and tiles need the system's permission."""
    everything = frozenset(feature for other in LEVELS for feature in other.needs)
    monkeypatch.setattr(target, "host_features", lambda: everything)
    generic, *others = LEVELS
    assert {level.machine for level in others} == {"x86_64", "aarch64"}
    for machine, may in itertools.product(("x86_64", "aarch64", "riscv64"), (True, False)):
        monkeypatch.setattr(target, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(target, "_may_use_tiles", lambda may=may: may)
        wanted = [level for level in others if level.machine == machine and (may or "amx-tile" not in level.needs)]
        assert target.levels() == [generic, *wanted]


def names_on_arm(monkeypatch: pytest.MonkeyPatch, system: str, library: object) -> list[str]:
    """The levels of an AArch64 machine whose C library this is."""
    monkeypatch.setattr("platform.machine", lambda: {"linux": "aarch64", "darwin": "arm64"}.get(system, "ARM64"))
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(target.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(target, "host_features", host_features.__wrapped__)
    monkeypatch.setattr(target, "_llvm_features", lambda: pytest.fail("LLVM is not asked"))
    return [level.name for level in target.levels()]


class Function:
    """A function of a C library, to which ctypes gives types."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> int:
        return self._call(*arguments)


def test_linux_on_arm_is_asked_by_the_auxiliary_vector(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not by /proc/cpuinfo, which is the host's under an emulator."""
    (tmp_path / "cpuinfo").write_text("flags : avx2 fma f16c bmi1 bmi2 abm movbe popcnt\n")
    monkeypatch.setattr(target, "_CPUS", tmp_path / "cpuinfo")
    dotprod, i8mm, other = 1 << 20, 1 << 13, 1 << 1 | 1 << 19 | 1 << 21
    for first, second, names in [
        (other, 0, ["generic", "neon"]),
        (other | dotprod, dotprod, ["generic", "neon", "neon-dot"]),
        (other | dotprod, i8mm, ["generic", "neon", "neon-dot", "neon-i8mm"]),
        (other | i8mm, i8mm, ["generic", "neon"]),
    ]:
        library = SimpleNamespace(getauxval=Function({16: first, 26: second}.__getitem__))
        assert names_on_arm(monkeypatch, "linux", library) == names


def test_macos_is_asked_by_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails for names that an older system does not know."""

    def system(known: dict[str, int]) -> SimpleNamespace:
        def sysctlbyname(name: bytes, out: Any, size: Any, new: None, new_size: int) -> int:
            if name.decode() not in known or size._obj.value != 4:
                return -1
            out._obj.value = known[name.decode()]
            return 0

        return SimpleNamespace(sysctlbyname=Function(sysctlbyname))

    dotprod, i8mm = "hw.optional.arm.FEAT_DotProd", "hw.optional.arm.FEAT_I8MM"
    for known, names in [
        ({}, ["generic", "neon"]),
        ({dotprod: 1, i8mm: 0}, ["generic", "neon", "neon-dot"]),
        ({dotprod: 1, i8mm: 1}, ["generic", "neon", "neon-dot", "neon-i8mm"]),
    ]:
        assert names_on_arm(monkeypatch, "darwin", system(known)) == names
    assert names_on_arm(monkeypatch, "win32", None) == ["generic", "neon"]  # what every such CPU has


def test_llvm_knows_every_feature_that_linux_lists() -> None:
    """LLVM asks the CPU, and which registers the system saves. Linux may be told to list fewer."""
    if target.machine() != "x86_64" or target._linux_features() is None:
        pytest.skip("Linux lists no features of an x86 CPU here")
    needed = {feature for level in LEVELS for feature in level.needs}
    assert target.host_features() & needed <= target._llvm_features()


def test_features_that_linux_does_not_list_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = "fma f16c bmi1 bmi2 abm movbe popcnt avx2 avx_vnni avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"

    monkeypatch.setattr(target, "_CPUS", tmp_path / "cpuinfo")
    monkeypatch.setattr(target, "host_features", target.host_features.__wrapped__)

    def names(content: str) -> list[str]:
        (tmp_path / "cpuinfo").write_text(content)
        return [level.name for level in target.levels()]

    lines = "processor\t: 0\nflags\t\t: fpu {}\nvmx flags\t: vnmi\nprocessor\t: 1\nflags\t\t: fpu avx2\n"
    assert names(lines.format(flags)) == ["generic", "avx2", "avx2-vnni", "avx512", "avx512-vnni"]
    assert names(lines.format(flags.replace("avx_vnni", "avx512vbmi")))[2:] == ["avx512", "avx512-vnni", "avx512-vbmi"]
    assert names(lines.format(flags + " avx512vbmi avx512_bf16 sse4a"))[-2:] == ["avx512-vbmi", "avx512-zen"]
    assert names(lines.format(flags.replace(" avx2", ""))) == ["generic"]
    assert names(lines.format("")) == ["generic"]


def test_where_linux_lists_nothing_llvm_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    actual = target.host_features()
    monkeypatch.setattr(target, "host_features", target.host_features.__wrapped__)
    monkeypatch.setattr(target, "_llvm_features", lambda: actual)
    monkeypatch.setattr(target, "_CPUS", tmp_path / "cpuinfo")
    for content in (None, "Features\t: asimd\n", ""):
        if content is not None:
            (tmp_path / "cpuinfo").write_text(content)
        assert target.host_features() is actual


def test_an_unknown_cpu_gets_kernels_without_special_instructions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import llvmlite.binding as llvm

    def unknown() -> None:
        raise RuntimeError("failed to get host cpu features.")

    monkeypatch.setattr(llvm, "get_host_cpu_features", unknown)
    monkeypatch.setattr(target, "_CPUS", tmp_path / "missing")
    monkeypatch.setattr(target, "host_features", target.host_features.__wrapped__)
    assert [level.name for level in target.levels()] == ["generic"]


def test_the_variable_names_the_highest_level(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in levels():
        monkeypatch.setenv(VARIABLE, level.name)
        assert target.best() == self_test.choose().level == level
    monkeypatch.setenv(VARIABLE, "")
    assert target.best() == levels()[-1]


def test_a_wrong_name_is_an_error_with_the_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "avx1024")
    with pytest.raises(EngineError) as raised:
        select("cpu", 1)
    for part in (VARIABLE, "avx1024", *(level.name for level in levels())):
        assert part in str(raised.value)


@pytest.mark.parametrize("types", [("f16", "linear8"), ("ring4", "turbo3")])
def test_kernels_work_at_a_level_that_they_do_not_know(types: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    level = Narrow()
    libraries = {one: library.Library(one, None) for one in (level, LEVELS[0])}
    monkeypatch.setattr("polarlm.engine.backends.native.launch.library", lambda level, sources: libraries[level])
    self_test.check(level)
    cases = [case_of(native(one), Shape(types), [Sequence_(100), Sequence_(37, rows=2)]) for one in libraries]
    np.testing.assert_array_equal(*(case.attended() for case in cases))
    prompt = case_of(native(level), Shape(types), [Sequence_(0, rows=50)], is_prompt=True)
    prompt.check(prompt.attended())
    assert level.dots > 0


@pytest.mark.skipif(len(levels()) < 2, reason="this CPU has one level")
@pytest.mark.parametrize("why", ["wrong results", "out of registers"])
def test_a_level_that_does_not_work_is_passed_over(broken, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    level, lower = levels()[-1], levels()[-2]
    if why == "wrong results":
        right = level.dot4
        monkeypatch.setattr(level, "dot4", lambda *arguments, **options: right(*arguments, **options) + 1)
        broken(set(), RuntimeError())
    else:
        broken({level.name}, RuntimeError("LLVM ERROR: out of registers\nmore"))
    ops, note = select("cpu", 1)
    assert isinstance(ops, NativeOps)
    assert why in note
    assert f"level {lower.name} are used" in note
    assert "\n" not in note


def assert_numpy_with_a_reason(reason: str) -> None:
    ops, note = select("cpu", 1)
    assert ops.backend == "numpy"
    assert reason in note
    assert "NumPy" in note
    assert note.endswith(".")
    assert "\n" not in note


def test_without_llvmlite_numpy_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    assert_numpy_with_a_reason("pip install 'polarlm[cpu]'")


@pytest.mark.parametrize("error", [ImportError("no library\nmore"), OSError("no library"), TypeError(), MemoryError()])
def test_a_broken_llvmlite_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def choose() -> None:
        raise error

    monkeypatch.setattr("polarlm.engine.backends.native.ops.choose", choose)
    assert_numpy_with_a_reason("no library" if str(error) else type(error).__name__)


def test_where_no_level_works_numpy_computes(broken) -> None:
    broken({level.name for level in LEVELS}, RuntimeError("no such target"))
    assert_numpy_with_a_reason("no such target")


@pytest.mark.slow
def test_where_memory_must_not_be_executed_numpy_computes() -> None:
    """Linux can forbid a process to make memory executable; this one has to say so without a traceback."""
    if ctypes.sizeof(ctypes.c_void_p) != 8 or not sys.platform.startswith("linux"):
        pytest.skip("prctl is Linux's")
    program = """
import ctypes, sys
from polarlm.engine.backends.select import select
import polarlm.engine.backends.native.ops
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN
    sys.exit("prctl")
ops, note = select("cpu", 1)
print(type(ops).__name__, note)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    if done.returncode and done.stderr.strip() == "prctl":
        pytest.skip("this Linux has no PR_SET_MDWE")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("NumpyOps ")
    assert "\n" not in done.stdout.strip()
