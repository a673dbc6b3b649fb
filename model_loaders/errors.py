"""The error of this package: a sentence for the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class LoadError(ValueError):
    """A model cannot be loaded. The message names the file, what is wrong with it, and what to do."""


@contextmanager
def panics_told(where: str) -> Iterator[None]:
    """A context in which a panic of a library in Rust is a LoadError that begins with `where`.

    PyO3 raises one as a BaseException, whose class no module has.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise LoadError(f"{where} failed in its library ({error}): the tokenizer's file is damaged.") from None
