"""ik_llama.cpp for comparison: its `llama-bench`, built by the user (`bench.speed.llama_bench`).

Without AVX-512's F, BW, DQ, VL and VNNI all in its build it falls back to AVX2 kernels. It says so when it loads a
model, and the version here says what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polarlm.bench.speed import llama_bench
from polarlm.bench.speed.child import serve
from polarlm.bench.speed.peers import NoPeer

NAME, LABEL, PROGRAM = "ik_llama.cpp", "ik_llama.cpp", llama_bench.PROGRAM
CACHES = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
NOTES = (f"ik_llama.cpp {llama_bench.NOTE}",)
_FLAGS = ("-fa", "1", "-rtr", "1")  # flash attention, which quantized caches need; weights repacked while they load
_KERNELS = {"HAVE_FANCY_SIMD is defined": "AVX-512 kernels", "HAVE_FANCY_SIMD is NOT defined": "AVX2 kernels"}


class Program(llama_bench.Program):
    QUICK = ("-w", "0")

    def kernels(self, measured: dict[str, Any], said: str) -> str:
        return next((name for line, name in _KERNELS.items() if line in said), "kernels of unknown instructions")

    def after(self, tokens: int, steps: int) -> Sequence[str]:
        return "-p", "0", "-n", "0", "-gp", f"{tokens},{steps}"


def start(path: str, context: int, threads: int, cache: str, program: str) -> Program:
    """A program that exists, which makes room for the tokens of each run. Raises NoPeer."""
    return Program(path, threads, cache, program, _FLAGS)


if __name__ == "__main__":
    serve(start, [NoPeer])
