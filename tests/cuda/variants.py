"""Every way in which the engine compiles its kernels, and a set of them that is small enough for every test run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.backends.kernels import source
from tests.cuda.nvrtc import SHARED_LIMIT

Define = int | float | str


@dataclass(frozen=True)
class Variant:
    """One text: `cuda/<kernel>.cu` with a codec and constants; dynamic_shared: most bytes of any launch."""

    kernel: str
    defines: Mapping[str, Define]
    codec: str | None = None
    dynamic_shared: int = 0

    def text(self) -> str:
        return source(self.kernel, self.codec, **self.defines)

    def __str__(self) -> str:
        values = " ".join(f"{name}={value}" for name, value in self.defines.items())
        return " ".join(part for part in (self.kernel, self.codec, values) if part)


_TYPES = ("float", "__half", "__nv_bfloat16")
_SHORT = _TYPES[1:]
_HEAD_DIMS = (64, 80, 96, 128, 256)


def _all(kernel: str, **choices: tuple[Define, ...]) -> list[Variant]:
    """Every combination of the values of each constant."""
    return [Variant(kernel, dict(zip(choices, values, strict=True))) for values in itertools.product(*choices.values())]


def _rotate() -> list[Variant]:
    return [Variant("rotate", {"ACT": act, "D": d, "ORDER": d & -d}) for act in _TYPES for d in _HEAD_DIMS]


# File name in cuda/ → every variant.
VARIANTS: dict[str, list[Variant]] = {
    "append_kv": _all("append_kv", ACT=_TYPES, STORE=_TYPES, D=_HEAD_DIMS),
    "embed": _all("embed", ACT=_TYPES, WEIGHT=_TYPES),
    "gemv": _all("gemv", ACT=_TYPES, WEIGHT=_SHORT, NORMED=(0, 1), OUTPUTS=(4,), ROWS=(1, 2, 4, 8)),
    "rms_norm": _all("rms_norm", ACT=_TYPES, WEIGHT=_TYPES),
    "rope": _all("rope", ACT=_TYPES, D=_HEAD_DIMS),
    "rotate": _rotate(),
    "silu_mul": _all("silu_mul", ACT=_TYPES),
}


def covering() -> Iterator[tuple[Variant, int]]:
    """Every kernel for every architecture; the variants take turns, in steps that change every constant."""
    for variants in VARIANTS.values():
        step = len(variants) // len(SHARED_LIMIT) + 1
        for i, arch in enumerate(SHARED_LIMIT):
            yield variants[i * step % len(variants)], arch


def everything() -> Iterator[tuple[Variant, int]]:
    for variants in VARIANTS.values():
        yield from itertools.product(variants, SHARED_LIMIT)
