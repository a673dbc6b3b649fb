"""Replaces threads, locks and pipes in a forked child, which cannot use its parent's.

A forked child has a copy of all memory, but only the thread that forked.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Renewable(Protocol):
    """An object with threads, locks or pipes."""

    def renew(self) -> None:
        """Replace them in a child that has just been forked and has one thread."""


_holders: WeakSet[Renewable] = WeakSet()


def renew_in_children(holder: Renewable) -> None:
    """Call `holder.renew` in every child forked by `os.fork`, for as long as `holder` is alive."""
    _holders.add(holder)


def _renew_all() -> None:
    for holder in list(_holders):
        holder.renew()


if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(after_in_child=_renew_all)
