"""Errors for head dims, block sizes and options that a codec does not support."""

from __future__ import annotations


def check_head_dim(name: str, head_dim: int, multiple: int) -> None:
    if head_dim % multiple:
        raise ValueError(
            f"Cache type {name} needs a head dimension that is a multiple of {multiple}, "
            f"and this model's is {head_dim}: choose another cache type, such as f16."
        )


def check_block_size(name: str, block_size: int, multiple: int) -> None:
    if block_size % multiple:
        raise ValueError(
            f"Cache type {name} groups {multiple} tokens, and a block has {block_size}: "
            f"choose a block size that is a multiple of {multiple}."
        )


def check_no_options(name: str, options: tuple[str, ...]) -> None:
    if options:
        raise ValueError(f"Cache type {name} has no options, but {'+'.join(options)!r} was given: write {name}.")
