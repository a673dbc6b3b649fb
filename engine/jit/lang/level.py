"""What kernels ask a set of CPU instructions for; `engine.jit.isa` has a class for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from polarlm.engine.jit.lang.values import Value


class Level(ABC):
    """A level of CPU features: what its registers hold, and how it does what LLVM does not find by itself.

    The operations are those of `byte_ops` and `float_ops`, which check their arguments; e is the `Emitter`.
    """

    name: str
    cpu = ""
    """LLVM's name of a CPU that has the features; empty for any."""
    needs: tuple[str, ...] = ()
    """The features that the host must have, by LLVM's names."""
    wishes: tuple[str, ...] = ()
    """Preferences for LLVM."""

    lanes = 4
    """32-bit numbers in a register."""
    registers = 16
    """Of vectors."""
    sums = 2
    """Vectors of 16 numbers that stay in registers beside what is multiplied for them."""
    float_tile = 2, 1
    """Rows, and vectors of 16 columns, of a product of float32 matrices whose sums stay in registers."""
    byte_register = 0
    """Bytes of the registers that instructions on bytes and words take; 0 if kernels do without such ones."""
    fuses = False
    """Whether a product and a sum of floats are one instruction, with one rounding."""
    wide_tables = False
    """Whether one instruction looks up 64 or 128 bytes. It ignores the bits of an index above."""

    @property
    def features(self) -> str:
        """Features and preferences as LLVM reads them."""
        return ",".join([*(f"+{name}" for name in self.needs), *self.wishes])

    @property
    def has_room(self) -> bool:
        """Whether registers hold 16 vectors of 16 numbers: the sums of several, beside what is multiplied for them."""
        return self.registers * self.lanes >= 16 * 16

    @abstractmethod
    def dot4(self, e: Any, total: Value, unsigned: Value, signed: Value, fits: bool) -> Value: ...

    @abstractmethod
    def dot2(self, e: Any, total: Value, a: Value, b: Value) -> Value: ...

    @abstractmethod
    def pair_products(self, e: Any, unsigned: Value, signed: Value) -> Value: ...

    @abstractmethod
    def scaled_product(self, e: Any, a: Value, b: Value) -> Value: ...

    @abstractmethod
    def join_words(self, e: Any, low: Value, high: Value) -> Value: ...

    @abstractmethod
    def lookup_in_lanes(self, e: Any, table: Value, index: Value) -> Value: ...

    @abstractmethod
    def table(self, e: Any, pointer: Value, entries: int) -> Callable[[Value], Value]:
        """The function that looks up indices in the bytes at a pointer."""

    @abstractmethod
    def pair_table(self, e: Any, first: bytes, second: bytes) -> Callable[[Value], tuple[Value, Value]]:
        """The function that looks up indices in both tables."""

    @abstractmethod
    def half_to_float(self, e: Any, bits: Value) -> Value: ...

    @abstractmethod
    def float_to_half(self, e: Any, x: Value) -> Value: ...
