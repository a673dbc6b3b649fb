"""Compile every variant of every kernel for every architecture and print what each uses. No GPU is needed.

    python -m scripts.compile_all [KERNEL ...]

Ends with status 1 if any kernel does not compile, spills, or uses too much shared memory.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from polarlm.engine.errors import EngineError
from tests.cuda.nvrtc import compile_text
from tests.cuda.test_compile import faults, row
from tests.cuda.variants import VARIANTS, Variant, everything


def check(pair: tuple[Variant, int]) -> list[str]:
    """Print a row for each kernel of a variant, compiled for an architecture; return the faults."""
    variant, arch = pair
    try:
        compiled = compile_text(variant.text(), arch)
    except EngineError as error:
        return [f"sm_{arch} {variant}: {error}"]
    print(*(row(variant, usage) for usage in compiled), sep="\n")
    return [fault for usage in compiled for fault in faults(variant, usage)]


if __name__ == "__main__":
    wanted = [pair for pair in everything() if pair[0].kernel in (sys.argv[1:] or VARIANTS)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC compiles outside of Python's lock
        found = [fault for faulty in pool.map(check, wanted) for fault in faulty]
    print(*found, f"{len(wanted)} compilations, {len(found)} faults", sep="\n")
    sys.exit(bool(found))
