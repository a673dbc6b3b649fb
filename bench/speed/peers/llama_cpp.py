"""llama.cpp on a GPU for comparison: its `llama-bench`, built by the user (`bench.speed.llama_bench`)."""

from __future__ import annotations

from polarlm.bench.speed import llama_bench
from polarlm.bench.speed.child import serve
from polarlm.bench.speed.peers import NoPeer

NAME, LABEL, PROGRAM, DEVICE = "llama.cpp", "llama.cpp", llama_bench.PROGRAM, "cuda"
CACHES = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
NOTES = (f"llama.cpp {llama_bench.NOTE}",)
FLAGS = ("-ngl", "99", "-fa", "1")  # all layers are on the GPU; flash attention, which quantized caches need


def start(path: str, context: int, threads: int, cache: str, program: str) -> llama_bench.Program:
    """A program that exists, which makes room for the tokens of each run. Raises NoPeer."""
    return llama_bench.Program(path, threads, cache, program, FLAGS)


if __name__ == "__main__":
    serve(start, [NoPeer])
