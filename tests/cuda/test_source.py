"""The text that the compiler of CUDA gets."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine import weight_formats
from polarlm.engine.backends.cuda.device import kernel_source
from polarlm.engine.backends.cuda.kv.cache import SideArrays, SpanHeader

SOURCES = sorted(kernel_source.folder().rglob("*.cu*"))
TWINS = ("codecs",)  # folders of files that are called like their twins in Python


def test_one_text_of_constants_prelude_and_kernel() -> None:
    text = kernel_source.source("embed", VALUE=1, WEIGHT="bf16")
    order = ["#define VALUE 1", "#define WEIGHT bf16", '#line 1 "cuda/prelude.cuh"']
    order += ['#line 1 "cuda/weights.cuh"', "struct bf16 ", '#line 1 "cuda/linear/embed.cu"']
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert text.count("embed_kernel(") == 1


@pytest.mark.parametrize("value", [0.1, 1 / 3, -2.5e-30, 1.0, 1e30])
def test_a_float_constant_is_the_nearest_float32(value: float) -> None:
    text = kernel_source.source("embed", VALUE=value)
    literal = re.search(r"#define VALUE (\S+)f\n", text)
    assert float.fromhex(literal[1]) == np.float32(value)


def test_every_text_is_ascii_and_only_comments_are_changed_for_it() -> None:
    """The compiler's front end writes it in the encoding of the locale: cp1252 on Windows has no U+2212."""
    for file in SOURCES:
        text = file.read_text(encoding="utf-8")
        room = file.parent.name
        compiled = kernel_source._text(f"{room}/{file.name}" if room in TWINS else file.name)
        assert compiled.isascii(), file.name
        assert compiled.count("\n") == text.count("\n") + 2, file.name
        assert "/*" not in text, file.name
        assert re.sub(r"//.*", "", text).isascii(), file.name


EMULATOR = [file for file in (Path(__file__).parents[1] / "cuda_emulator").iterdir() if file.suffix in {".h", ".cpp"}]


def test_lines_have_at_most_120_characters() -> None:
    for file in [*SOURCES, *EMULATOR]:
        assert [line for line in file.read_text(encoding="utf-8").splitlines() if len(line) > 120] == [], file.name


def test_kernels_read_numbers_in_two_bytes_and_blocks_of_codes() -> None:
    read = {name for name in weight_formats.available() if kernel_source.can_read(name)}
    grouped = {name for name in weight_formats.available() if weight_formats.get(name).bits}
    lattices = {name for name in grouped if weight_formats.get(name).grid}
    assert read == {"f16", "bf16"} | grouped - lattices
    for name in read:
        text = kernel_source.source("embed", WEIGHT=name)
        assert text.index("struct PlainWeights") < text.index(f"struct {name} ") < text.index("embed_kernel(")
    assert not kernel_source.can_read("float")


KERNELS = [file for file in SOURCES if file.parent.name not in TWINS]


def test_no_kernel_names_a_codec_or_a_weight_format() -> None:
    """What a kernel must know of one, its struct says: no kernel changes for a new one."""
    for file in KERNELS:
        code = re.sub(r'//.*|"[^"]*"', "", file.read_text(encoding="utf-8"))
        twins = {file.stem for file in SOURCES if file.parent.name in TWINS} | set(weight_formats.available())
        assert len(twins) > 6, file.name
        assert not twins & set(re.findall(r"\w+", code)), file.name


def test_every_kernel_says_what_it_needs() -> None:
    """Kernels have the name of their op, and their file says shapes, launch, constants and preconditions."""
    for file in filter(lambda file: file.suffix == ".cu", SOURCES):
        text = file.read_text(encoding="utf-8")
        kernels_of = re.findall(r"(\w+)_kernel\(", text)
        assert kernels_of, file.name
        assert all(name.split("_")[0] == file.stem.split("_")[0] for name in kernels_of), file.name
        assert text.startswith("// "), file.name
        for word in ("Grid (", "DEFINES:", "PRECOND:"):
            assert word in text, file.name


def test_a_kernel_is_joined_by_the_parts_that_its_head_names() -> None:
    parts = kernel_source.joined_files(kernel_source._text("decode_attention.cu"))
    assert (parts[0], parts[-1], len(parts)) == ("attention.cuh", "decode_share.cuh", 7)  # on two lines
    texts = [file.read_text(encoding="utf-8") for file in SOURCES if file.suffix == ".cu"]
    named = {part for text in texts for part in kernel_source.joined_files(text)}
    readers = {file.name for file in SOURCES if file.parent.name in {"cuda", *TWINS}}
    assert named == {file.name for file in SOURCES if file.suffix == ".cuh"} - readers
    assert set(parts) <= named


def test_a_span_is_the_same_on_both_sides() -> None:
    prelude = (kernel_source.folder() / "prelude.cuh").read_text(encoding="utf-8")
    struct = re.search(r"^struct Span \{\n(.*?)\n\n", prelude, re.DOTALL | re.MULTILINE)
    members = [name for line in re.findall(r"^ +int ([\w, ]+);", struct[1], re.MULTILINE) for name in line.split(", ")]
    assert tuple(members) == SpanHeader._fields


def test_the_arrays_of_a_side_are_the_same_on_both_sides() -> None:
    struct = re.search(
        r"^struct SideArrays \{\n(.*?)\};", kernel_source._text("full_block.cuh"), re.DOTALL | re.MULTILINE
    )
    assert tuple(re.findall(r"\*(\w+)", struct[1])) == SideArrays._fields
