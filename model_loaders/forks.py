"""Replaces threads, locks and pipes in a forked child, which cannot use its parent's.

A forked child has a copy of all memory, but only the thread that forked.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar
from weakref import WeakSet

Value = TypeVar("Value")
_holders: WeakSet[Any] = WeakSet()


def renew_in_children(holder: Any) -> None:
    """Call `holder.renew()`, which replaces its threads, locks and pipes, in every child forked by `os.fork`.

    The child has one thread then. It is called for as long as `holder` is alive.
    """
    _holders.add(holder)


def _renew_all() -> None:
    for holder in list(_holders):
        holder.renew()


if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(after_in_child=_renew_all)


class cached_property(functools.cached_property[Value]):  # noqa: TID251
    """`functools.cached_property` without its lock. Two threads may both compute a value, and one of the two is kept.

    Before Python 3.12 one lock serves all objects of a class. A child that is forked while another thread computes the
    value of any of them would wait for it forever.
    """

    def __init__(self, func: Callable[[Any], Value]) -> None:
        super().__init__(func)
        self.lock = nullcontext()
