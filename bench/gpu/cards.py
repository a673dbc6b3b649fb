"""GPUs as the model of time knows them, by data sheets, measurements or assumptions, as the `source` of each says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """clock: Hz. bandwidth: bytes a second of a copy, read and written. cache: bytes a second that multiprocessors read
    from L2, an estimate. shared_memory: bytes of a multiprocessor. product_clocks: of m16n8k16 with float32 sums, on a
    multiprocessor, by `mma.sync`. gemm: FLOPs a second of a library's large product, assumed."""

    name: str
    arch: int
    processors: int
    clock: float
    bandwidth: float
    cache: float
    shared_memory: int
    product_clocks: float
    gemm: float
    source: str

    @property
    def bytes_per_clock(self) -> float:
        """Of one multiprocessor, when all read."""
        return self.bandwidth / self.processors / self.clock


_SHEET = "data sheet; bandwidth: 0.9 of it"
_COPY = "bandwidth and mma.sync measured; the rest: data sheet"
_BLACKWELL = "data sheet; bandwidth: 0.9 of it; mma.sync assumed as fast as an H200's"
_DENSE = 0.75  # of the data sheet's FLOPs that a library's product is assumed to reach
# Of mma.sync, by the measured attention of a prompt of 8,192 tokens.
_HOPPER_CLOCKS = 2.75


def _geforce(name: str, arch: int, processors: int, clock: float, sheet: float, flops: float) -> Machine:
    """With 14 bytes of L2 in a clock of a multiprocessor, and half the rate of tensor cores with sums of float32."""
    l2 = 14 * processors * clock
    return Machine(
        f"NVIDIA GeForce RTX {name}", arch, processors, clock, 0.9 * sheet, l2, 100 << 10, 8, _DENSE * flops, _SHEET
    )


MACHINES = {
    "3060": _geforce("3060", 86, 28, 1.777e9, 360e9, 25.5e12),
    "4060": _geforce("4060", 89, 24, 2.46e9, 272e9, 30.2e12),
    "4090": _geforce("4090", 89, 128, 2.52e9, 1.008e12, 165e12),
    "5090": _geforce("5090", 120, 170, 2.41e9, 1.792e12, 209.5e12),
    "a100": Machine(
        *("NVIDIA A100 80GB", 80, 108, 1.41e9, 0.9 * 2.039e12, 3.9e12, 164 << 10, 2, _DENSE * 312e12), _SHEET
    ),
    "h100": Machine(
        *("NVIDIA H100 SXM", 90, 132, 1.98e9, 3.0e12, 5.5e12, 228 << 10, _HOPPER_CLOCKS, _DENSE * 989e12), _COPY
    ),
    "h200": Machine(
        *("NVIDIA H200", 90, 132, 1.98e9, 4.26e12, 5.5e12, 228 << 10, _HOPPER_CLOCKS, _DENSE * 989e12), _COPY
    ),
    "b200": Machine(
        *("NVIDIA B200", 100, 148, 1.965e9, 0.9 * 8e12, 6.1e12, 228 << 10, _HOPPER_CLOCKS, _DENSE * 2250e12), _BLACKWELL
    ),
}
