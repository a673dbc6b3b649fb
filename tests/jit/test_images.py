"""Object files as images: memory that runs at any address, and that nothing but the kernel's own code goes into."""

from __future__ import annotations

import ctypes
import struct
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine.jit.compile import images
from polarlm.engine.jit.compile.compiler import LoadedCode, compile_object
from polarlm.engine.jit.compile.images import LoadedImage, link
from polarlm.engine.jit.compile.target import levels, machine
from polarlm.engine.jit.lang import I8, I32, Emitter, Kernel, Level, Value, vector
from tests.jit.levels import Function, declared, every_level

if not images.AVAILABLE:
    pytest.skip("LLVM links kernels on this system", allow_module_level=True)

LEVEL = levels()[-1]


def emit_constants(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
    """Adds 0 to 63, bytes, and a vector of numbers to 64 int32 at `out`."""
    wide = vector(I32, 16)
    table = e.constant_bytes(bytes(range(64)))
    with e.loop(0, 4) as i:
        numbers = e.load(table + i * 16, vector(I8, 16)).zext(I32) + e.constant(wide, NUMBERS)
        e.store(e.load(args.out + i * 64, wide) + numbers, args.out + i * 64)


NUMBERS = tuple(range(1000, 1016))
CONSTANTS = Kernel("test_constants", emit_constants, declared("out"))


def is_right(loaded: LoadedCode) -> bool:
    """Whether such a kernel finds its constants."""
    out = np.ones(64, np.int32)
    call(loaded, out)
    return np.array_equal(out, 1 + np.arange(64) + np.tile(NUMBERS, 4))


def call(loaded: LoadedCode, out: np.ndarray) -> None:
    arguments = CONSTANTS.pack(CONSTANTS.arguments(out))
    Function(loaded.address)(arguments.ctypes.data, 0, 1, None)


@every_level
def test_code_finds_its_constants_at_any_address(level: Level) -> None:
    image = link(compile_object(CONSTANTS, level))
    first, second = LoadedImage(image), LoadedImage(image)
    assert first.address != second.address
    assert is_right(first)
    assert is_right(second)


def test_loops_of_zeros_are_no_calls() -> None:
    """LLVM likes to make a call of memset of them."""

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(0, 1000) as i:
            e.store(e.i64(0), args.out + i * 8)

    out = np.ones(1001, np.int64)
    call(LoadedImage(link(compile_object(Kernel("test_zeros", emit, declared("out")), LEVEL))), out)
    assert out.tolist() == [0] * 1000 + [1]


def test_what_the_code_does_not_contain_is_named() -> None:
    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        e.intrinsic("no_such_function", None)

    with pytest.raises(ValueError, match="no_such_function"):
        link(compile_object(Kernel("test_missing", emit, declared("out")), LEVEL))


def test_an_absolute_address_is_refused() -> None:
    code = bytearray(compile_object(CONSTANTS, LEVEL))
    header = next(
        at for at in range(struct.unpack_from("<40xQ", code)[0], len(code), 64) if code[at + 4 : at + 8] == b"\4\0\0\0"
    )
    (place,) = struct.unpack_from("<Q", code, header + 24)
    absolute = {"x86_64": 1, "aarch64": 257}[machine()]  # R_X86_64_64, R_AARCH64_ABS64
    struct.pack_into("<I", code, place + 8, absolute)
    with pytest.raises(ValueError, match=f"relocation of type {absolute} "):
        link(bytes(code))


@given(st.integers(0, (1 << 24) - 1), st.integers(0, (1 << 24) - 1), st.integers(0, 2**32 - 1))
def test_relocations_of_aarch64_change_their_field_alone(at: int, to: int, word: int) -> None:
    """As the ELF specification of the architecture (AAELF64) has them."""
    at, to = at & -4, to & -16
    pages = images._relocate(183, 275, word, at, to)
    assert (pages ^ word) & ~0x60FFFFE0 == 0
    assert ((pages >> 5 & 0x7FFFF) << 2 | pages >> 29 & 3) == ((to >> 12) - (at >> 12)) % 2**21
    for kind, shift in {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}.items():
        within = images._relocate(183, kind, word, at, to)
        assert (within ^ word) & ~0x3FFC00 == 0
        assert (within >> 10 & 0xFFF) << shift == to % 4096
    for kind in (282, 283):
        jump = images._relocate(183, kind, word, at, to)
        assert (jump ^ word) >> 26 == 0
        assert jump % 2**26 == (to - at) // 4 % 2**26
    for kind in (285, 282):  # places that are not whole words
        with pytest.raises(ValueError, match="relocation of type"):
            images._relocate(183, kind, word, at, to + 2)
    assert images._relocate(183, 261, word, at, to) == (to - at) % 2**32


@pytest.mark.parametrize(
    ("system", "name", "library", "there"),
    [
        ("linux", "x86_64", None, True),
        ("linux", "aarch64", {"__clear_cache": SimpleNamespace()}, True),
        ("linux", "aarch64", None, False),  # without libgcc, written code might not be what runs
        ("linux", "riscv64", {"__clear_cache": SimpleNamespace()}, False),
        ("darwin", "arm64", {"__clear_cache": SimpleNamespace()}, False),  # LLVM knows how memory is made executable
        ("win32", "AMD64", None, False),
    ],
)
def test_systems_that_link_images(
    system: str, name: str, library: dict[str, object] | None, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: str) -> dict[str, object]:
        if library is None:
            raise OSError(f"{path}: cannot open shared object file")
        return library

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: name)
    monkeypatch.setattr(images.ctypes, "CDLL", opened)
    monkeypatch.setattr(images, "_flush", images._flush.__wrapped__)
    assert images._is_available() == there


def test_written_code_is_flushed_where_instructions_have_caches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On AArch64, all of it, before anybody knows its address."""
    flushed: list[tuple[int, int]] = []
    monkeypatch.setattr(images, "machine", lambda: "aarch64")
    monkeypatch.setattr(images, "_flush", lambda: lambda first, last: flushed.append((first, last)))
    code = bytes(range(200))
    loaded = LoadedImage(struct.pack("<IHxx", 64, 183) + code)
    (first, last), *others = flushed
    assert not others
    assert (loaded.address, last) == (first + 64, first + 200)
    assert ctypes.string_at(first, 200) == code


def test_an_image_of_another_machine_is_refused() -> None:
    image = bytearray(link(compile_object(CONSTANTS, LEVEL)))
    own = {"x86_64": 62, "aarch64": 183}[machine()]
    assert image[4:6] == own.to_bytes(2, "little")
    image[4:6] = (62 + 183 - own).to_bytes(2, "little")
    for other in (bytes(image), b"", bytes(8)):
        with pytest.raises(ValueError, match="no image of this machine"):
            LoadedImage(other)
