"""An error for options that a codec does not have."""

from __future__ import annotations


def check_no_options(name: str, options: tuple[str, ...]) -> None:
    if options:
        raise ValueError(f"Cache type {name} has no options, but {'+'.join(options)!r} was given: write {name}.")
