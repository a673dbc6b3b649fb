"""What hot loops of kernels are looked through for."""

from __future__ import annotations

import pytest

pytest.importorskip("llvmlite")

from polarlm.bench.kernel_loops import Loop as Loop
from polarlm.engine.jit.isa.levels import LEVELS
from tests.jit.levels import special_levels as special_levels

X86 = [level for level in LEVELS if level.machine == "x86_64"]
ARM = [level for level in LEVELS if level.machine == "aarch64"]

# Dot products of 4 bytes and of 2 words: the instructions that `Level.dot4` and `dot2` exist for. Without VNNI bytes
# are multiplied as such where pairs of products fit 16 bits.
OF_SMALL_BYTES = {level.name: "vpdpbusd" if "vnni" in level.features else "vpmaddubsw" for level in X86}
OF_BYTES = {level.name: "vpdpbusd" if "vnni" in level.features else "vpmaddwd" for level in X86}
OF_WORDS = {level.name: "vpdpwssd" if "vnni" in level.features else "vpmaddwd" for level in X86}
