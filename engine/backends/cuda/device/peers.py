"""Access of a GPU to the memory of another one, without which copies between them go through the host's memory."""

from __future__ import annotations

from typing import Any

_HAS_ACCESS = 704  # cudaErrorPeerAccessAlreadyEnabled


def reach(runtime: Any, own: int, other: int) -> None:
    """Allow the current GPU, `own`, to read the memory of GPU `other`, if it can. runtime: CuPy's module.

    GPUs without NVLink or a common PCIe switch often cannot, and GeForce cards cannot.
    """
    if own == other or not runtime.deviceCanAccessPeer(own, other):
        return
    try:
        runtime.deviceEnablePeerAccess(other)
    except runtime.CUDARuntimeError as error:
        if error.status != _HAS_ACCESS:
            raise
