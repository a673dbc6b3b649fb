"""`polarlm speed --only drafts`: tokens per second with and without drafts, measured in turn: of prompt lookup, or of
another kind (`--spec-type`).

Three tasks: copying a text, editing a file of code, and writing prose; of a model without a chat template, three texts
that it continues. Answers are greedy, and the same with and without drafts. Answers of a model with random weights
cannot be predicted by prompt lookup. With `--replay` they are drafted from themselves, correctly where prompt lookup
would be correct in proper answers: the copied text, the edited file, and the demonstration model's prose.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from polarlm.bench.command import model_named
from polarlm.bench.report import Column, Table
from polarlm.bench.result import Result, digest_of_model
from polarlm.bench.runner import in_turn
from polarlm.bench.speed.contestants import OURS
from polarlm.bench.speed.options import Options
from polarlm.engine import Completion, Engine, PromptOptions, SamplingParams
from polarlm.engine.cli.commands import note
from polarlm.engine.limits import MOST_DRAFTED
from polarlm.engine.requests.drafters.prompt_lookup import NGRAM, PromptLookup

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
_PLAIN = "none"
BEGINNINGS = {
    "a girl": "Once upon a time, there was a little girl named",
    "a dog": "One day, a dog was walking in the park. He saw a",
    "a boy": "Tom was a boy who liked to play with his toys. One day,",
}


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
        position = len(ids) - self._prompt
        offer = self._offers[position] if position < len(self._offers) else Offer(0, 0)
        tokens = self._answer[position : position + min(most, offer.tokens)]
        return [token if at < offer.right else (token + 1) % self._vocabulary for at, token in enumerate(tokens)]

    def is_ready(self, ids: Sequence[int]) -> bool:
        return True

    def release(self) -> None:
        pass


def offers(prompt: Sequence[int], answer: Sequence[int], size: int, vocabulary: int) -> list[Offer]:
    """The draft of prompt lookup before each token of an answer."""
    lookup, ids, drafts = PromptLookup(size, vocabulary, prompt), [*prompt], []
    for position, token in enumerate(answer):
        draft = lookup.draft(ids, MOST_DRAFTED)
        rest = answer[position : position + len(draft)]
        wrong = (at for at, (drafted, right) in enumerate(zip(draft, rest, strict=False)) if drafted != right)
        drafts.append(Offer(len(draft), next(wrong, len(rest))))
        ids.append(token)
    return drafts


def measure(options: Options) -> Result:
    """The rows of all tasks. Raises FlagError, EngineError or LoadError."""
    threads = options.thread_count()
    patterns = _patterns(threads, options.token_count()) if options.replay else {}
    weights = model_named(options.weights, options.hf_repo)
    with _engine(weights, threads, options.spec_type, options.model_draft) as engine:
        digest = digest_of_model(engine.model.weights.files())
        model = f"{engine.model.name}, {engine.model.dtype}"
        about = {"model": model, **digest, "replay": options.replay, "drafts": options.spec_type}
        result = Result(about)
        tasks = BEGINNINGS if engine.model.template.is_default and not options.replay else TASKS
        for task, text in tasks.items():
            prompt = engine.prompt_ids(text if tasks is BEGINNINGS else [{"role": "user", "content": text}])
            _add(result, engine, options, task, prompt, patterns.get(task))
        return result


_COLUMNS = (
    Column.of("tokens", "tokens", "{:.0f}".format),
    Column.of("plain, tokens/s", "plain", "{:.1f}".format),
    Column.of("drafted, tokens/s", "drafted", "{:.1f}".format),
    Column.of("ratio", "ratio", "×{:.2f}".format),
    Column("right", lambda row: "{:.0f} of {:.0f}".format(*(row[name].value for name in ("accepted", "offered")))),
)


def table_of(result: Result) -> Table:
    return Table.of("task", _COLUMNS, ((task, figures) for task, _, figures in result.parts()))


def _engine(weights: str | None, threads: int, kind: str, model_draft: str | None = None) -> Engine:
    return Engine.load(
        weights, verbose=note, ctx_size=1024, parallel=1, threads=threads, spec_type=kind, model_draft=model_draft
    )


def _patterns(threads: int, tokens: int) -> dict[str, list[Offer]]:
    """Task → the drafts of prompt lookup in the correct answer, or in the demonstration model's prose."""
    with _engine(None, threads, "ngram-simple") as engine:
        size, vocabulary = NGRAM, engine.model.vocabulary.stop
        patterns = {}
        for task, question in TASKS.items():
            prompt = engine.prompt_ids([{"role": "user", "content": question}])
            if task in _ANSWERS:
                answer = engine.tokenize(_ANSWERS[task])
            else:
                answer = [*engine.generate(prompt, _params(_PLAIN, tokens, goes_on=False), _ANEW).token_ids]
            patterns[task] = offers(prompt, answer, size, vocabulary)
    return patterns


def _params(kind: str, tokens: int, *, goes_on: bool) -> SamplingParams:
    """Greedy parameters. goes_on: whether the answer continues after its end."""
    return SamplingParams(
        max_tokens=tokens, temperature=0, repeat_penalty=1, dry_multiplier=0, ignore_eos=goes_on, spec_type=kind
    )


def _add(
    result: Result,
    engine: Engine,
    options: Options,
    task: str,
    prompt: Sequence[int],
    pattern: Sequence[Offer] | None,
) -> None:
    """Add the rows of a task: tokens of the answer, tokens per second of all "plain" and "drafted" runs, the median of
    their ratios, drafted tokens and accepted ones. pattern: drafts to replay instead of prompt lookup's."""
    tokens = options.token_count() if pattern is None else len(pattern)

    def answer(kind: str) -> Completion:
        return engine.generate(prompt, _params(kind, tokens, goes_on=pattern is not None), _ANEW)

    expected = answer(_PLAIN).token_ids
    if pattern is not None:
        replay = Replay(len(prompt), expected, pattern, engine.model.vocabulary.stop)
        engine._drafting.drafter = lambda kind, ids, kv: replay  # type: ignore[method-assign]
    kinds = _PLAIN, options.spec_type
    answers = in_turn({kind: partial(answer, kind) for kind in kinds}, options.repeat)
    if any(completion.token_ids != expected for runs in answers.values() for completion in runs):
        note(f"{task}: the text differs between runs")
    plain, drafted = ([run.usage.generation_rate for run in answers[kind]] for kind in kinds)
    usage = answers[options.spec_type][-1].usage
    result.add(task, OURS, "plain", plain)
    result.add(task, OURS, "drafted", drafted)
    result.add(task, OURS, "ratio", [b / a for a, b in zip(plain, drafted, strict=True)])
    counts = {"tokens": len(expected), "offered": usage.drafted_tokens, "accepted": usage.accepted_tokens}
    result.add_all(task, OURS, counts)
