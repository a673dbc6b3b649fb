"""`polarlm speed`: tokens per second and memory, compared with other engines on the same file.

docs/speed.md says what is compared with what.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from polarlm.bench.command import at_least, refuse_what_moved
from polarlm.bench.speed import compare
from polarlm.bench.speed.options import GROUPS, PROGRAM
from polarlm.engine import EngineError
from polarlm.engine.cli.commands import command
from polarlm.engine.cli.flags import check_that, parse

__all__ = ["GROUPS", "main"]


@command
def main(argv: Sequence[str]) -> None:
    """Measures, writes the JSON, prints the tables."""
    refuse_what_moved(argv)
    options, destination = parse(
        argv,
        GROUPS,
        prog=" ".join(PROGRAM),
        description="Tokens a second and memory, compared with other engines on the same file.",
        checks={
            **dict.fromkeys(("session", "repeat"), at_least(1)),
            "minutes": check_that(lambda m: m > 0, "must be above 0"),
        },
    )
    if options.session is None:
        compare.run(options, destination, argv)
    else:
        try:
            from polarlm.bench.speed import session
        except ModuleNotFoundError as error:
            raise EngineError(f"A session needs httpx: pip install 'polarlm[serve]' installs it ({error})") from None
        session.run(options, destination, argv)


if __name__ == "__main__":
    sys.exit(main())
