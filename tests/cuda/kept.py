"""Kernels as NVIDIA's compiler has compiled them, kept in files: of a text, options and a compiler, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.compiled import kept
from tests.cuda import nvrtc
from tests.kept_files import COMPILED

Compile = Callable[[str, Sequence[str]], tuple[str, bytes]]


def keeping(compile: Compile, folder: Path = COMPILED) -> Compile:
    """`compile`, which is `nvrtc.run_compiler`, with the results that are in the folder."""

    def compiled(text: str, options: Sequence[str]) -> tuple[str, bytes]:
        library, headers = nvrtc.compiler()
        files = [Path(library._name), headers / "cuda_fp16.h"]
        stamps = [f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]

        def made() -> bytes:
            message, binary = compile(text, options)
            return message.encode() + b"\0" + binary

        message, _, binary = kept(made, text, *options, *stamps, folder=folder).partition(b"\0")
        return message.decode(), binary

    return compiled
