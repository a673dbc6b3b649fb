"""Compile every variant of every kernel for every architecture and print what each uses. No GPU is needed.

    python -m scripts.compile_all [KERNEL ...]

Ends with status 1 if any kernel does not compile, spills, or uses too much shared memory.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from polarlm.engine.errors import EngineError
from tests.cuda.nvrtc import compile_text, compiler
from tests.cuda.test_compile import faults, row
from tests.cuda.variants import VARIANTS, Variant, everything


def check(variant: Variant, arch: int) -> tuple[list[str], list[str]]:
    """Rows of the table and faults, of one compilation."""
    try:
        compiled = compile_text(variant.text(), arch)
    except EngineError as error:
        return [], [f"sm_{arch} {variant}: {error}"]
    return [row(variant, usage) for usage in compiled], [f for usage in compiled for f in faults(variant, usage)]


def main(names: list[str]) -> int:
    if unknown := set(names) - set(VARIANTS):
        print(f"no such kernel: {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}", file=sys.stderr)
        return 2
    try:
        compiler()
    except EngineError as error:
        print(error, file=sys.stderr)
        return 2
    wanted = [pair for pair in everything() if not names or pair[0].kernel in names]
    faults: list[str] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC compiles outside of Python's lock
        for rows, faulty in pool.map(lambda pair: check(*pair), wanted):
            print(*rows, sep="\n")
            faults += faulty
    print(*faults, f"{len(wanted)} compilations, {len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
