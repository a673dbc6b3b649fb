"""Products of warpgroups (`wgmma`): which GPUs have them, and whether attention of a prompt uses them there."""

from __future__ import annotations

import os

VARIABLE = "POLARLM_WGMMA"  # 1 turns kernels with these products on, where the GPU has them; 0 off

_CAPABILITY = 9, 0  # later GPUs have others instead
_PROVED = False  # whether all tests have passed on such a GPU


def is_wanted() -> bool:
    """Whether the environment turns these kernels on; if it says nothing, whether they are proved."""
    asked = os.environ.get(VARIABLE)
    return _PROVED if asked is None else asked == "1"


def is_there(capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability has these products."""
    return capability == _CAPABILITY
