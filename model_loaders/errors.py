"""The error of this package: a sentence for the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class LoadError(ValueError):
    """A model cannot be loaded. The message names the file, what is wrong with it, and what to do."""


def stand_in(path: Path, beginning: bytes) -> LoadError | None:
    """The error of a file that holds something else or nothing, by its first bytes; None for any other file."""
    if not beginning:
        return LoadError(f"{path} is empty; download it again.")
    if beginning.startswith(b"version https://git-lfs"):
        return LoadError(
            f"{path} is a pointer of Git LFS, not the file itself: write git lfs pull in the repository, or download "
            "the file."
        )
    if beginning.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        return LoadError(
            f"{path} is a web page, not the file: download it again, from an address with /resolve/ in place of "
            "/blob/, and logged in if the model needs it."
        )
    return None


@contextmanager
def close_on_error(source: Any) -> Iterator[None]:
    """Close what a model is read from, such as a file, if reading it fails."""
    try:
        yield
    except BaseException:
        source.close()
        raise


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
