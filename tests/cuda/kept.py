"""Kernels as NVIDIA's compiler has compiled them, kept in files: of a text, options and a compiler, once."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from polarlm.bench.gpu import nvrtc

Compile = Callable[[str, Sequence[str]], tuple[str, bytes]]


def keeping(compile: Compile, folder: Path) -> Compile:
    """`compile`, which is `nvrtc.run_compiler`, with the results that are in the folder."""

    def found(text: str, options: Sequence[str]) -> tuple[str, bytes]:
        library, headers = nvrtc.compiler()
        files = [Path(library._name), headers / "cuda_fp16.h"]
        stamps = [f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
        path = folder / hashlib.sha256("\0".join([text, *options, *stamps]).encode()).hexdigest()
        if not path.exists():
            message, binary = compile(text, options)
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as unfinished:
                (whole := Path(unfinished) / "whole").write_bytes(message.encode() + b"\0" + binary)
                os.replace(whole, path)
        message, _, binary = path.read_bytes().partition(b"\0")
        return message.decode(), binary

    return found
