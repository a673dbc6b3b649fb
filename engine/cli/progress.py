"""Progress on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm


@contextmanager
def progress_bar(is_shown: bool, **settings: Any) -> Iterator[tqdm[Any] | None]:
    """Yields a progress bar, which disappears at the end; None if it is not to be shown, or there is no terminal.

    settings: of tqdm, whose import takes 2 MB.
    """
    if not (is_shown and sys.stderr.isatty()):
        yield None
        return
    from tqdm import tqdm

    with tqdm(leave=False, **settings) as bar:
        yield bar


def amounts(bar: tqdm[Any] | None) -> Callable[[int, int], None]:
    """A function of what is done and the total, which shows both on the bar, if there is one."""

    def show(done: int, total: int) -> None:
        if bar is not None:
            bar.total = total
            bar.update(done - bar.n)

    return show
