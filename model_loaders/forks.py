"""What a child process cannot share with the one it was forked from: threads, locks that they held, pipes.

A forked process has a copy of all memory, but of the threads only the one that forked.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Renewable(Protocol):
    """Something that has threads, locks or pipes."""

    def renew(self) -> None:
        """Make them anew, in a child process that was just forked and has one thread."""


_holders: WeakSet[Renewable] = WeakSet()


def renew_in_children(holder: Renewable) -> None:
    """From now on, as long as `holder` is alive, have `renew` called in every child forked by `os.fork`."""
    _holders.add(holder)


def _renew_all() -> None:
    for holder in list(_holders):
        holder.renew()


if hasattr(os, "register_at_fork"):  # no such thing on Windows
    os.register_at_fork(after_in_child=_renew_all)
