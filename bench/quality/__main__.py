"""`polarlm quality`: what each cache type costs on a model in quality and in speed; it writes one page in minutes.

`polarlm quality compare A B` compares two results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from polarlm.bench.quality import cache_cost, compare, kld_base, peers, snapshots, tool_cost
from polarlm.bench.quality import types as compared
from polarlm.bench.quality.inputs import ENOUGH_TOKENS, LEAST_TOKENS, QualityConfig
from polarlm.engine.cli.commands import run
from polarlm.engine.cli.flags import Check, FlagError, check_that, parse

_OF_CACHE_TYPES = ("types", "codec", "ablate", "every_token_coded", "windows", "window", "weight_type")
GROUPS: Mapping[str, type] = {"Quality": QualityConfig}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes the page and its JSON, prints the table; returns the exit code."""
    with peers.while_measured():
        return run(_measure, argv)


def _measure(argv: Sequence[str]) -> None:
    if [*argv[:1]] == ["compare"]:
        compare.print_comparison(argv[1:])
        return
    options = read_options(argv)
    if options.tools:
        if options.text is not None or options.state or options.kld_base is not None:
            raise FlagError("--tools has tasks of its own: leave TEXT, --state and --kld-base out")
        tool_cost.measure(options, argv, time.monotonic)
        return
    if options.text is None and (options.kld_base is None or options.state):
        raise FlagError(
            "TEXT is missing: give a UTF-8 text like what the model will read; figures of fewer than "
            f"{ENOUGH_TOKENS:,} tokens, about 16 KB of English, say little; - is standard input"
        )
    if options.kld_base is not None and options.state:
        raise FlagError("--state measures snapshots, and --kld-base cache types: leave one of them out")
    if options.state:
        if options.changed(*_OF_CACHE_TYPES):
            raise FlagError(
                "--state measures snapshots, with keys and values in half precision; leave --types out, and the flags "
                "of their windows"
            )
        snapshots.measure(options, argv, time.monotonic)
    elif options.kld_base is not None and options.text is not None:
        if options.changed(*_OF_CACHE_TYPES, "output"):
            raise FlagError(
                "with TEXT, --kld-base writes full precision alone: leave --types and --output out, and the flags of "
                "their windows"
            )
        kld_base.write(options, time.monotonic)
    else:
        if options.kld_base is not None and options.changed("window"):
            raise FlagError("--kld-base FILE has windows of its own: leave --window out")
        with compared.also_of_file(options.codec) as names:
            if names and not options.changed("types"):
                options = replace(options, types=",".join([*names, options.types]))
            cache_cost.measure(options, argv, time.monotonic)


def read_options(argv: Sequence[str]) -> QualityConfig:
    """The flags of `argv`. Raises FlagError."""
    (options,) = parse(
        argv,
        GROUPS,
        prog="polarlm quality",
        description="What each cache type costs on your model and your text: one page, as HTML and JSON. "
        "polarlm quality compare A.json B.json: how two results differ.",
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
