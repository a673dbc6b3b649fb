"""`python -m polarlm.bench.speed.drafts`: tokens per second with and without prompt lookup, measured in turn.

Three tasks: copying a text, editing a file of code, and writing prose. Answers are greedy, and the same with and
without drafts. Answers of a model with random weights cannot be predicted by prompt lookup. With `--replay` they are
drafted from themselves, correctly where prompt lookup would be correct in proper answers: the copied text, the edited
file, and the demonstration model's prose.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from polarlm.bench import report
from polarlm.bench.command import WEIGHTS_HELP, at_least
from polarlm.bench.report import Output
from polarlm.engine import Completion, Engine, PromptOptions, SamplingParams
from polarlm.engine.cli.commands import command, note
from polarlm.engine.cli.flags import parse
from polarlm.engine.config import EngineConfig, setting
from polarlm.engine.limits import MOST_DRAFTED
from polarlm.engine.requests.drafts import NGRAM, PromptLookup

_TEXT = """The lighthouse stood on the last rock before the open sea. Every evening, when the fishing boats came home, \
its keeper climbed the one hundred and twelve steps to the lamp, cleaned the glass with a soft cloth, and lit the \
flame. In winter the storms shook the tower, and the waves threw stones against the door, but the light never went \
out. The people of the village said that the keeper had not slept a whole night in thirty years. He laughed when they \
told him so. He slept well, he said, as long as he could hear the machinery turn."""
_CODE = '''def read_config(path):
    """Read a configuration file and return its settings."""
    settings = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            if "=" not in line:
                raise ValueError(f"line {number}: expected name=value, found {line!r}")
            name, value = line.split("=", 1)
            settings[name.strip()] = value.strip()
    return settings


def write_config(path, settings):
    """Write settings to a configuration file."""
    with open(path, "w", encoding="utf-8") as file:
        for name, value in sorted(settings.items()):
            file.write(f"{name}={value}\\n")
'''
TASKS = {
    "copy": f"Repeat the following text word for word, without any changes:\n\n{_TEXT}",
    "code edit": f"Here is a Python file:\n\n```python\n{_CODE}```\n\nRename the function read_config to load_settings "
    "and write out the whole file again.",
    "prose": "Write a short story about a robot who learns to paint.",
}
_ANSWERS = {"copy": _TEXT, "code edit": f"```python\n{_CODE.replace('read_config', 'load_settings')}```"}
_ANEW = PromptOptions(cache_prompt=False)
_PLAIN, _DRAFTED = "none", "ngram-simple"


@dataclass(frozen=True)
class Options:
    """The flags of the measurement."""

    weights: str | None = setting(None, "--weights", "-m", metavar="PATH", help=WEIGHTS_HELP)
    replay: bool = setting(
        False, "--replay", help="for random weights: drafts that are right where those of answers to the task would be"
    )
    tokens: int = setting(200, "--tokens", metavar="N", help="tokens of an answer, at most")
    threads: int = setting(0, "-t", "--threads", metavar="N", help="CPU threads; 0 takes those of the engine")
    repeat: int = setting(3, "--repeat", metavar="N", help="runs of each kind; the median of their ratios counts")


@dataclass(frozen=True)
class Row:
    """The results of a task: tokens of the answer, tokens per second of runs with and without drafts, drafted
    tokens."""

    task: str
    tokens: int
    plain: Sequence[float]
    drafted: Sequence[float]
    drafted_tokens: int
    accepted_tokens: int

    @property
    def ratio(self) -> float:
        """The median ratio of two consecutive runs."""
        return statistics.median(b / a for a, b in zip(self.plain, self.drafted, strict=True))


class Offer(NamedTuple):
    """A draft of prompt lookup before a token: the number of drafted tokens, and how many of them are correct."""

    tokens: int
    right: int


class Replay:
    """A drafter with the numbers of drafted and correct tokens of another answer, at each position."""

    def __init__(self, prompt: int, answer: Sequence[int], offers: Sequence[Offer], vocabulary: int) -> None:
        """prompt: number of tokens. answer: ids of the answer without drafts."""
        self._prompt, self._answer, self._offers, self._vocabulary = prompt, answer, offers, vocabulary

    def draft(self, ids: Sequence[int], most: int) -> Sequence[int]:
        place = len(ids) - self._prompt
        offer = self._offers[place] if place < len(self._offers) else Offer(0, 0)
        given = self._answer[place : place + min(most, offer.tokens)]
        return [token if at < offer.right else (token + 1) % self._vocabulary for at, token in enumerate(given)]

    def is_ready(self, ids: Sequence[int]) -> bool:
        return True

    def release(self) -> None:
        pass


def offers(prompt: Sequence[int], answer: Sequence[int], size: int, vocabulary: int) -> list[Offer]:
    """The draft of prompt lookup before each token of an answer."""
    lookup, ids, found = PromptLookup(size, vocabulary, prompt), [*prompt], []
    for place, token in enumerate(answer):
        given = lookup.draft(ids, MOST_DRAFTED)
        rest = answer[place : place + len(given)]
        right = next((at for at, (one, other) in enumerate(zip(given, rest, strict=False)) if one != other), len(rest))
        found.append(Offer(len(given), right))
        ids.append(token)
    return found


@command
def main(argv: Sequence[str]) -> None:
    """Measures, writes the JSON, prints a table."""
    options, destination = parse(
        argv,
        {"Drafts": Options, "Output": Output},
        prog="python -m polarlm.bench.speed.drafts",
        description="Tokens a second with prompt lookup and without.",
        checks={"repeat": at_least(1), "tokens": at_least(2)},
    )
    patterns = _patterns(options) if options.replay else {}
    with _engine(options.weights, options.threads) as engine:
        output = destination.path("drafts", engine.model.name)
        rows = [_measure(engine, options, task, patterns.get(task)) for task in TASKS]
        subject = f"{engine.model.name}, {engine.model.dtype}"
    lines = [
        [
            row.task,
            str(row.tokens),
            *(f"{statistics.median(rates):.1f}" for rates in (row.plain, row.drafted)),
            f"×{row.ratio:.2f}",
            f"{row.accepted_tokens} of {row.drafted_tokens}",
        ]
        for row in rows
    ]
    title = ["task", "tokens", "plain, tokens/s", "drafted, tokens/s", "ratio", "right"]
    table = report.table(title, lines)
    figures = [asdict(row) | {"ratio": row.ratio} for row in rows]
    report.write(output, "drafts", argv, {"model": subject, "replay": options.replay, "rows": figures}, complete=True)
    note(f"Written to {output}")
    print(table)


def _engine(weights: str | None, threads: int) -> Engine:
    config = EngineConfig(weights=weights, ctx_size=1024, parallel=1, threads=threads, spec_type=_DRAFTED)
    return Engine.load(config=config, verbose=note)


def _patterns(options: Options) -> dict[str, list[Offer]]:
    """Task → the drafts of prompt lookup in the correct answer, or in the demonstration model's prose."""
    with _engine(None, options.threads) as engine:
        size, vocabulary = NGRAM, engine.model.vocabulary.stop
        found = {}
        for task, question in TASKS.items():
            prompt = engine.prompt_ids([{"role": "user", "content": question}])
            if task in _ANSWERS:
                answer = engine.tokenize(_ANSWERS[task])
            else:
                answer = [*engine.generate(prompt, _params(_PLAIN, options.tokens, goes_on=False), _ANEW).token_ids]
            found[task] = offers(prompt, answer, size, vocabulary)
    return found


def _params(kind: str, tokens: int, *, goes_on: bool) -> SamplingParams:
    """Greedy parameters. goes_on: whether the answer continues after its end."""
    return SamplingParams(
        max_tokens=tokens, temperature=0, repeat_penalty=1, dry_multiplier=0, ignore_eos=goes_on, spec_type=kind
    )


def _measure(engine: Engine, options: Options, task: str, pattern: Sequence[Offer] | None) -> Row:
    """Runs of both kinds in turn, after a warm-up of each. pattern: drafts to replay instead of prompt lookup's."""
    prompt = engine.prompt_ids([{"role": "user", "content": TASKS[task]}])
    tokens = options.tokens if pattern is None else len(pattern)

    def answer(kind: str) -> Completion:
        params = _params(kind, tokens, goes_on=pattern is not None)
        return engine.generate(prompt, params, _ANEW)

    whole = answer(_PLAIN).token_ids
    if pattern is not None:
        replay = Replay(len(prompt), whole, pattern, engine.model.vocabulary.stop)
        engine._drafting.drafter = lambda kind, ids: replay  # type: ignore[method-assign]
    given = answer(_DRAFTED)
    rates: dict[str, list[float]] = {_PLAIN: [], _DRAFTED: []}
    for _ in range(options.repeat):
        for kind, found in rates.items():
            given = answer(kind)
            if given.token_ids != whole:
                note(f"{task}: with {kind} the text differs")
            found.append(given.usage.generation_rate)
    usage = given.usage
    return Row(task, len(whole), rates[_PLAIN], rates[_DRAFTED], usage.drafted_tokens, usage.accepted_tokens)


if __name__ == "__main__":
    sys.exit(main())
