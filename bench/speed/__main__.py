"""`polarlm speed`: tokens per second, memory and starts, compared with other engines on the same file.

`--only` measures a part of that, or another section: drafts of prompt lookup, texts of an embedding model, experts that
are read from the file. `--parts` measures what the time of prompts goes to. docs/speed.md says what is compared with
what.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from polarlm.bench.command import at_least
from polarlm.bench.report import Report, Section, provenance
from polarlm.bench.result import Result, Writer
from polarlm.bench.speed import compare, drafts, embeddings, experts, parts
from polarlm.bench.speed.options import DRAFTS, EMBEDDINGS, EXPERTS, GROUPS, PARTS, PROGRAM, file_names
from polarlm.engine.cli.commands import command
from polarlm.engine.cli.flags import check_that, parse

__all__ = ["GROUPS", "main"]

# Each has `measure(options)`, which returns the result, and `table_of`, which makes a table of that.
_SECTIONS: Mapping[str, ModuleType] = {DRAFTS: drafts, EMBEDDINGS: embeddings, EXPERTS: experts, PARTS: parts}


@command
def main(argv: Sequence[str]) -> None:
    """Measures, writes the JSON, prints the tables."""
    options, destination = parse(
        argv,
        GROUPS,
        prog=" ".join(PROGRAM),
        description="Tokens a second and memory, compared with other engines on the same file.",
        checks={
            "repeat": at_least(1),
            "tokens": at_least(2),
            "minutes": check_that(lambda m: m > 0, "must be above 0"),
        },
    )
    name = options.section or ""
    section = _SECTIONS.get(name)
    if section is None:
        compare.run(options, destination, argv)
        return
    writer = Writer(
        destination.path(name, file_names(options.weights or options.hf_repo)),
        f"speed.{name}",
        argv,
        program=PROGRAM,
    )
    result: Result = section.measure(options)
    writer.write(result, complete=True)
    title = f"{name.capitalize()}: {result.about.get('model', '')}".rstrip(": ")
    Report(title, "", [Section(title, [section.table_of(result)])], provenance(result)).show(writer.path)


if __name__ == "__main__":
    sys.exit(main())
