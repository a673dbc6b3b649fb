"""Routing: the choice of the machine for a request."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Protocol

_TRIES = 8  # choices that affinity tries before it takes the least loaded of them
_MASK = (1 << 64) - 1


class Router(Protocol):
    """Chooses machines. It is told of every change of a machine's load, its number of unfinished requests."""

    def choose(self, conversation: int) -> int:
        """The machine for a conversation's next request."""
        ...

    def changed(self, machine: int, load: int) -> None:
        """Record that a machine now has `load` unfinished requests."""
        ...


class Random:
    """Chooses a random machine."""

    def __init__(self, machines: int, seed: int) -> None:
        self._machines, self._random = machines, random.Random(seed).random

    def choose(self, conversation: int) -> int:
        return int(self._random() * self._machines)

    def changed(self, machine: int, load: int) -> None:
        pass


class LeastLoaded:
    """Chooses the machine with the least load; among several, the one whose load changed longest ago."""

    def __init__(self, machines: int, seed: int) -> None:
        self._stamps = [0] * machines
        self._heap = [(0, machine, machine, 0) for machine in range(machines)]
        self._count = machines

    def choose(self, conversation: int) -> int:
        while True:
            _, _, machine, stamp = self._heap[0]
            if self._stamps[machine] == stamp:
                return machine
            heapq.heappop(self._heap)

    def changed(self, machine: int, load: int) -> None:
        self._count += 1
        self._stamps[machine] = self._count
        heapq.heappush(self._heap, (load, self._count, machine, self._count))


class Affinity:
    """Chooses a conversation's first choice, unless its load exceeds `bound` times the mean load plus one; then its
    second choice, and so on.

    A choice is a hash of the conversation and the choice's number: while the set of machines does not change, choices
    are distributed as in rendezvous hashing, without a hash per machine.
    """

    def __init__(self, machines: int, seed: int, bound: float = 1.5) -> None:
        self._machines, self._seed, self._bound = machines, seed, bound
        self._loads = [0] * machines
        self._total = 0

    def choose(self, conversation: int) -> int:
        most = self._bound * self._total / self._machines + 1
        tried = []
        for number in range(_TRIES):
            machine = _mixed(conversation * _TRIES + number + (self._seed << 40)) % self._machines
            if self._loads[machine] <= most:
                return machine
            tried.append(machine)
        return min(tried, key=self._loads.__getitem__)

    def changed(self, machine: int, load: int) -> None:
        self._total += load - self._loads[machine]
        self._loads[machine] = load


def _mixed(value: int) -> int:
    """A 64-bit hash: the finalizer of SplitMix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


ROUTERS: dict[str, Callable[[int, int], Router]] = {"random": Random, "least": LeastLoaded, "affinity": Affinity}
