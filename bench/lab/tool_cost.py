"""`python -m polarlm.bench.lab.tool_cost`: what cache types cost in chains of tool calls, paired with f16's chain by
chain."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarlm.bench.command import TYPES_HELP, at_least
from polarlm.bench.lab.tool_chains import TOOLS, Task, beginning, chain, orders, solves
from polarlm.bench.quality import types as compared
from polarlm.bench.quality.inputs import open_model, page_file
from polarlm.bench.quality.tables import TYPE
from polarlm.bench.report import Column, Report, Section, Table, provenance
from polarlm.bench.result import Result, ResultWriter, read
from polarlm.bench.runner import WorkloadRunner
from polarlm.engine import Engine, PromptOptions, SamplingParams
from polarlm.engine.cli.commands import command, note
from polarlm.engine.cli.flags import parse
from polarlm.engine.cli.progress import counting
from polarlm.engine.config import hub_setting, model_setting, setting
from polarlm.engine.loading.assembly import assemble, replace_cache
from polarlm.engine.loading.checks import settle

_ROOM = 2048  # tokens that a chain adds
_TOGETHER, _OTHERWISE = 4, 3  # chains at once, and those of the floor
_FULL = "f16"
CHAINS = "chains of calls"  # a subject
_HOW = (
    "A chain is two to four calls of twelve functions about orders that stand in the history, and is solved if all of "
    "them have the right names and values. All types have the same chains, four at once; f16 with three at once shows "
    "what other batches alone change."
)

COLUMNS = [
    Column.of("solved", "solved", "{:.1%}".format, "chains with all calls right, ± the standard error"),
    Column.of("lost", "lost", "{:.0f}".format, "chains that f16 solves and the type does not"),
    Column.of("won", "won", "{:.0f}".format, "chains that the type solves and f16 does not"),
    Column.of("p", "p", "{:.2g}".format, "McNemar's exact test: how often lost and won differ so by chance alone"),
]


@dataclass(frozen=True)
class Options:
    """The flags."""

    weights: str | None = model_setting()
    hf_repo: str | None = hub_setting()
    types: str = setting("balanced,quality,compact", "--types", metavar="TYPES", help=TYPES_HELP)
    chains: int = setting(60, "--chains", metavar="N", help="chains")
    history: int = setting(2048, "--history", metavar="N", help="tokens before each of them")
    output: str | None = setting(None, "--output", "-o", metavar="FILE", help="where the page goes, and its JSON")
    device: str = setting("auto", "--device", choices=("auto", "cpu", "cuda"), help="as in the chat")
    threads: int = setting(0, "-t", "--threads", metavar="N", help="CPU threads; 0 as in the chat")


@command
def main(argv: Sequence[str]) -> None:
    """Measure, write the page and its JSON, also after Ctrl-C, and print the table. An interrupted run of the same
    chains goes on behind what its file has. Raises FlagError, EngineError."""
    (options,) = parse(
        argv,
        {"Chains of tool calls": Options},
        prog="python -m polarlm.bench.lab.tool_cost",
        description="What cache types cost in chains of tool calls.",
        checks={**dict.fromkeys(("chains", "history"), at_least(1)), "threads": at_least(0)},
    )
    with open_model(options.weights, options.hf_repo) as model:
        (full,) = compared.choose_types(_FULL, None, model.config)
        types = [one for one in compared.choose_types(options.types, None, model.config) if one.label != _FULL]
        about = {"model": model.name, "weights": model.dtype, **model.digest}
        path = model.path
    writer = ResultWriter(page_file(options.output, f"{about['model']} tools"), "lab.tool_cost", argv)
    tokens, count = options.history, options.chains
    settings: dict[str, Any] = {"ctx_size": tokens + _ROOM, "threads": options.threads}
    settings |= {"device": options.device, "parallel": _TOGETHER}
    parts = assemble(settle(str(path), None, {**settings, "cache_type": _FULL}), note)
    result = _begun(writer.path, {**about, "history_tokens": tokens, "chains": count})
    runner = WorkloadRunner(write=lambda complete: writer.write(result, complete=complete))
    runs = [(one.label, one, _TOGETHER) for one in (full, *types)]
    runs.append((f"{_FULL}, {_OTHERWISE} at once", full, _OTHERWISE))
    try:
        with runner.final_write(), counting("Chains", "chain", len(runs) * count) as advance:
            listed = orders(random.Random(1))
            earlier = beginning(Engine(parts), listed, tokens)
            result.about["orders"] = len(listed)
            chains = [chain(number, listed) for number in range(count)]
            for label, one, together in runs:
                if result.figures(CHAINS, label):
                    advance(label, count)
                    continue
                config = settle(None, None, {**settings, **one.settings()})
                engine = Engine(replace_cache(parts, config, note, encoding=one.encoding))
                add(result, label, solve(engine, earlier, chains, together, lambda: advance(label)))  # noqa: B023
                runner.keep()
    finally:
        parts.close()
    report_of(result).show(writer.path)


def _begun(path: Path, about: Mapping[str, Any]) -> Result:
    """The result of an interrupted run that was about the same, or a new one."""
    if path.exists():
        with suppress(OSError, ValueError, KeyError, TypeError):
            earlier = read(path)
            if not earlier["complete"] and all(earlier.about.get(name) == value for name, value in about.items()):
                return earlier
    return Result(about)


def solve(
    engine: Engine,
    earlier: Sequence[Mapping[str, Any]],
    chains: Sequence[Sequence[Task]],
    together: int,
    advance: Callable[[], None],
) -> list[bool]:
    """Which chains the engine solves. earlier: the messages before each. together: chains at once."""

    def one(number: int) -> bool:
        is_solved = solves(engine, earlier, number, chains[number])
        advance()
        return is_solved

    # All chains find it in the cache then, instead of computing it side by side.
    engine.generate(engine.prompt_ids(earlier, PromptOptions(tools=TOOLS)), SamplingParams(max_tokens=1))
    with ThreadPoolExecutor(together) as pool:
        return [*pool.map(one, range(len(chains)))]


def add(result: Result, label: str, solutions: Sequence[bool]) -> None:
    """Add the rows of a contestant, compared with f16's if that was measured before."""
    count, right = len(solutions), sum(solutions)
    share = right / count
    result.add(CHAINS, label, "solved", solutions, value=share, error=math.sqrt(share * (1 - share) / count))
    if label != _FULL:
        full = result.figures(CHAINS, _FULL)["solved"].runs
        lost, won = (
            sum(one == before and two == after for one, two in zip(full, solutions, strict=True))
            for before, after in ((True, False), (False, True))
        )
        result.add_all(CHAINS, label, {"lost": lost, "won": won, "p": mcnemar(lost, won)})


def mcnemar(lost: int, won: int) -> float:
    """The probability of counts at least as unequal, if a chain is lost as often as it is won: exact, two-sided.

    >>> mcnemar(5, 0), mcnemar(3, 3)
    (0.0625, 1.0)
    """
    count, least = lost + won, min(lost, won)
    return min(1.0, 2 * sum(math.comb(count, k) for k in range(least + 1)) / 2**count)


def table_of(result: Result) -> Table:
    return Table.of(TYPE, COLUMNS, [(label, figures) for _, label, figures in result.parts(CHAINS)])


def report_of(result: Result) -> Report:
    return Report(
        title=f"Chains of tool calls: {result['model']}",
        lead=f"{result['chains']} chains after a history of {result['history_tokens']:,} tokens",
        sections=[Section("", [table_of(result)], _HOW)],
        about=provenance(result, is_timed=False),
        columns={column.name: column.says for column in COLUMNS},
    )


if __name__ == "__main__":
    sys.exit(main())
