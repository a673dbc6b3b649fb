"""`polarlm quality`: what each cache type costs on a model in quality and in speed; it writes one page in minutes."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from polarlm.bench.command import refuse_what_moved
from polarlm.bench.quality import cache_cost
from polarlm.bench.quality import types as compared
from polarlm.bench.quality.inputs import ENOUGH_TOKENS, LEAST_TOKENS, PROGRAM, QualityConfig
from polarlm.engine.cli.commands import command
from polarlm.engine.cli.flags import Check, FlagError, check_that, parse

GROUPS: Mapping[str, type] = {"Quality": QualityConfig}


@command
def main(argv: Sequence[str]) -> None:
    """Measures, writes the page and its JSON, prints the table."""
    refuse_what_moved(argv)
    options = read_options(argv)
    if options.text is None:
        raise FlagError(
            "TEXT is missing: give a UTF-8 text like what the model will read; figures of fewer than "
            f"{ENOUGH_TOKENS:,} tokens, about 16 KB of English, say little; - is standard input"
        )
    with compared.more_types(options.codec) as names:
        if names and options.types == compared.DEFAULT_TYPES:
            options = replace(options, types=",".join([*names, options.types]))
        cache_cost.measure(options, argv, time.monotonic)


def read_options(argv: Sequence[str]) -> QualityConfig:
    """The flags of `argv`. Raises FlagError."""
    (options,) = parse(
        argv,
        GROUPS,
        prog=" ".join(PROGRAM),
        description="What each cache type costs on your model and your text: one page, as HTML and JSON.",
        checks={
            "minutes": check_that(lambda minutes: 0 < minutes <= 24 * 60, "must be above 0 and at most 1440"),
            "windows": _none_or(1),
            "window": _none_or(LEAST_TOKENS),
            "threads": check_that(lambda threads: threads >= 0, "must be 0 or more"),
        },
    )
    return options


def _none_or(least: int) -> Check:
    return check_that(lambda number: number == 0 or number >= least, f"must be 0, or at least {least}")


if __name__ == "__main__":
    sys.exit(main())
