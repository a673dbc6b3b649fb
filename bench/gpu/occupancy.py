"""How many blocks of a kernel a multiprocessor has at once."""

from __future__ import annotations

from typing import NamedTuple

from polarlm.engine.backends.cuda.launch_configs import SYSTEM_BYTES

REGISTERS = 65536  # of a multiprocessor, and of a block at most
_REGISTER_UNIT = 8  # a thread's registers are rounded up to it
_SHARED_UNIT = 128  # a block's bytes are rounded up to it


class _Capability(NamedTuple):
    threads: int  # of a multiprocessor
    blocks: int


# By compute capability, times ten: "Technical Specifications per Compute Capability" in the CUDA programming guide.
_CAPABILITIES = {
    80: _Capability(2048, 32),
    86: _Capability(1536, 16),
    89: _Capability(1536, 24),
    90: _Capability(2048, 32),
    100: _Capability(2048, 32),
    120: _Capability(1536, 24),
}


def resident_blocks(arch: int, shared_memory: int, registers: int, threads: int, shared: int) -> int:
    """The number of blocks of a kernel that a multiprocessor has at once; 0 where not even one fits.

    arch: compute capability, times ten. shared_memory: bytes of the multiprocessor. registers: of a thread. threads,
    shared: of a block; shared: its bytes of shared memory, static ones included.
    """
    capability = _CAPABILITIES[arch]
    of_registers = -(-registers // _REGISTER_UNIT) * _REGISTER_UNIT * -(-threads // 32) * 32
    of_shared = -(-(shared + SYSTEM_BYTES) // _SHARED_UNIT) * _SHARED_UNIT
    limits = capability.blocks, capability.threads // threads, REGISTERS // of_registers, shared_memory // of_shared
    return min(limits)
