"""`python -m polarlm.bench.lab.edited_contexts`: what it costs to clear old results of tools from a context.

After every fourth call all results but the newest three are cleared, except the list of orders. There are three ways:

    not cleared   nothing is
    read again    a placeholder replaces each cleared result, and what follows the first one is read again
    holes         keys and values stay as they were read, but later tokens no longer see those of cleared results

A conversation is a history and two chains of calls (`tool_chains`). The right calls and their results stand before each
call, which is right if greedy sampling under the grammar writes it: a prompt's logits show that. A chain is solved if
all of its calls are right.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench.command import at_least
from polarlm.bench.lab.holes import Context
from polarlm.bench.lab.tool_chains import TOOLS, beginning, call_grammar, chain, exchange, orders, result_of
from polarlm.bench.lab.tool_cost import begun, mcnemar
from polarlm.bench.quality.divergence import compare
from polarlm.bench.quality.inputs import open_model, page_file
from polarlm.bench.report import Column, Report, Section, Table, provenance
from polarlm.bench.result import Result, ResultWriter
from polarlm.bench.runner import WorkloadRunner
from polarlm.engine import Engine, PromptOptions, SamplingParams
from polarlm.engine.cli.commands import command, note
from polarlm.engine.cli.flags import parse
from polarlm.engine.cli.progress import counting
from polarlm.engine.config import hub_setting, model_setting, setting
from polarlm.engine.loading.assembly import assemble
from polarlm.engine.loading.checks import settle
from polarlm.engine.model.forward import Transformer
from polarlm.engine.sampling.constraints import allowed_bits
from polarlm.engine.sampling.sample import log_softmax
from polarlm.engine.state.prefix import common_prefix

Numbers = frozenset[int]  # of calls, from 1
States = dict[int, np.ndarray]
"""Number of a call → hidden states before each of its tokens; 0 → those of the tokens behind call `_LAST_BEFORE`."""

_EVERY, _KEPT, _NEVER_CLEARED, _PLACEHOLDER = 4, 3, "list_orders", "[cleared]"
_LAST_BEFORE, _COMPARED = 8, 256  # the call behind which so many tokens are compared
_ROOM = 2048  # tokens that two chains and a story add
_STORIES = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "trained_hybrid" / "held_out.txt"
_STORY, _CONTEXTS = 2000, 2  # characters; contexts of a history that are compared, with each text
NOT_CLEARED, READ_AGAIN, HOLES = ARMS = "not cleared", "read again", "holes"
PAIRS = ((READ_AGAIN, HOLES), (NOT_CLEARED, READ_AGAIN), (NOT_CLEARED, HOLES))
OWN, STORY = TEXTS = "calls", "a story"  # what stands behind call `_LAST_BEFORE`
COLUMNS = [
    Column.of("right", "right", "{:.1%}".format, "chains that are solved, and calls, ± the standard error"),
    Column.of("points", "points", "{:+.1f}".format, "by how much the second way has more right, in percentage points"),
    Column.of("lost", "lost", "{:.0f}".format, "right in the first way alone"),
    Column.of("won", "won", "{:.0f}".format, "right in the second way alone"),
    Column.of("p", "p", "{:.2g}".format, "McNemar's exact test"),
    Column.of("nats", "nats", "{:+.3f}".format, "by how much a call is more probable in the second way"),
    *(
        Column.of(f"KL, {text}", f"kl, {text}", "{:.4f}".format, f"KL of the {_COMPARED} tokens behind a clearing")
        for text in TEXTS
    ),
]


@dataclass(frozen=True)
class Options:
    """The flags."""

    weights: str | None = model_setting()
    hf_repo: str | None = hub_setting()
    histories: int = setting(10, "--histories", metavar="N", help="histories, each with its own orders and log")
    conversations: int = setting(12, "--conversations", metavar="N", help="conversations after each of them")
    history: int = setting(4096, "--history", metavar="N", help="tokens of a history")
    output: str | None = setting(None, "--output", "-o", metavar="FILE", help="where the page goes, and its JSON")
    threads: int = setting(0, "-t", "--threads", metavar="N", help="CPU threads; 0 as in the chat")


@command
def main(argv: Sequence[str]) -> None:
    """Measure, write the page and its JSON, and print the tables. An interrupted run goes on behind the histories that
    its file has. Raises FlagError, EngineError."""
    (options,) = parse(
        argv,
        {"Edited contexts": Options},
        prog="python -m polarlm.bench.lab.edited_contexts",
        description="What it costs to clear old results of tools from a context.",
        checks={**dict.fromkeys(("histories", "conversations", "history"), at_least(1)), "threads": at_least(0)},
    )
    with open_model(options.weights, options.hf_repo) as model:
        about = {"model": model.name, "weights": model.dtype, **model.digest}
        path = model.path
    writer = ResultWriter(page_file(options.output, f"{about['model']} edits"), "lab.edited_contexts", argv)
    about |= {"history_tokens": options.history, "conversations": options.conversations}
    result, runner = begun(writer.path, about), WorkloadRunner(write=lambda done: writer.write(result, complete=done))
    settings = {"ctx_size": options.history + _ROOM, "threads": options.threads, "device": "cpu"}
    parts = assemble(settle(str(path), None, {**settings, "cache_type": "f16", "parallel": 8, "kv_memory": "3G"}), note)
    each = len(ARMS) * (options.conversations + _CONTEXTS)
    try:
        with runner.final_write(), counting("Reading", "conversation", options.histories * each) as advance:
            engine = Engine(parts)
            for seed in range(1, options.histories + 1):
                if result.figures(f"history {seed}", "all"):
                    advance("", each)
                    continue
                history, members = conversations(engine, seed, options.conversations, options.history)
                for arm in measure(engine, parts.model, history, members, result, f"history {seed}"):
                    advance(f"history {seed}, {arm}")
                runner.keep()
    finally:
        parts.close()
    report_of(result).show(writer.path)


# -- conversations -----------------------------------------------------------------------------------------------------


class Conversation:
    """Messages with calls, which are numbered from 1 on; a call's result is the message behind it. chains: the numbers
    of calls of the chains at the end. text: what stands behind call `_LAST_BEFORE`."""

    def __init__(
        self, engine: Engine, messages: Sequence[Mapping[str, Any]], chains: Sequence[int] = (), text: str = OWN
    ) -> None:
        self._engine, self._messages, self.chains, self.text = engine, messages, chains, text
        self._calls = [index for index, one in enumerate(messages) if one.get("tool_calls")]
        self.count = len(self._calls)
        self.numbers = range(self.count - sum(chains) + 1, self.count + 1)  # of the chains' calls
        self._found: dict[int, tuple[list[int], list[np.ndarray]]] = {}

    def cleared(self, number: int) -> Numbers:
        """The calls whose results are cleared when call `number` is made."""
        made = (number - 1) // _EVERY * _EVERY
        names = (self._messages[index]["tool_calls"][0]["function"]["name"] for index in self._calls)
        return frozenset(one for one, name in enumerate(names, 1) if one <= made - _KEPT and name != _NEVER_CLEARED)

    def prompt(self, cleared: Numbers = frozenset(), number: int | None = None) -> list[int]:
        """The ids up to where call `number` begins, or of all messages."""
        results = {self._calls[one - 1] + 1 for one in cleared}
        end = len(self._messages) if number is None else self._calls[number - 1]
        messages = [
            {**one, "content": _PLACEHOLDER} if index in results else one
            for index, one in enumerate(self._messages[:end])
        ]
        return self._engine.prompt_ids(messages, PromptOptions(tools=TOOLS))

    @cached_property
    def ids(self) -> list[int]:
        return self.prompt()

    def call(self, number: int) -> tuple[list[int], list[np.ndarray]]:
        """The tokens of a call, and the masks of those that the grammar allows in their places."""
        if number not in self._found:
            constraint = self._engine.grammars.constraint(SamplingParams(grammar=call_grammar(self._engine)))
            assert constraint is not None
            tokens, masks, start = list[int](), list[np.ndarray](), len(self.prompt(number=number))
            while not constraint.finished:
                masks.append(np.array(constraint.allowed()))
                tokens.append(self.ids[start + len(tokens)])
                constraint.accept(tokens[-1])
            self._found[number] = tokens, masks
        return self._found[number]

    def place(self, number: int, cleared: Numbers = frozenset()) -> range:
        """Where a call is in a prompt."""
        start = len(self.prompt(cleared, number))
        return range(start, start + len(self.call(number)[0]))

    def edits(self) -> Iterator[tuple[int, list[range]]]:
        """Yield where in `ids` results are cleared, behind a call, and where these are."""
        for number in range(_EVERY, self.count, _EVERY):
            holes = []
            for one in sorted(self.cleared(number + 1) - self.cleared(number)):
                other = self.prompt(frozenset({one}))
                end = len(self.ids) - common_prefix(self.ids[::-1], other[::-1])
                holes.append(range(common_prefix(self.ids, other), end))
            yield self.place(number).stop, holes

    @cached_property
    def is_long(self) -> bool:
        """Whether `_COMPARED` tokens stand behind call `_LAST_BEFORE` before results are cleared again."""
        end = self.place(min(self.count, _LAST_BEFORE + _EVERY)).stop
        return end - self.place(_LAST_BEFORE).stop >= _COMPARED


def conversations(engine: Engine, seed: int, count: int, tokens: int) -> tuple[Conversation, list[Conversation]]:
    """A history, and conversations that begin with it; in the last `_CONTEXTS` a story stands behind a clearing."""
    listed, stories = orders(random.Random(seed)), _STORIES.read_text(encoding="utf-8")
    earlier, members = beginning(engine, listed, tokens, seed + 1), list[Conversation]()
    history = Conversation(engine, earlier)
    for index in range(count + _CONTEXTS):
        messages, chains, text = [*earlier], list[int](), OWN if index < count else STORY
        first = 2 * ((seed - 1) * count + index % count)
        for number in (first, first + 1):
            tasks = chain(number, listed)
            for step, (said, call) in enumerate(tasks):
                if text == STORY and history.count + sum(chains) + step == _LAST_BEFORE:
                    at = _STORY * (seed * _CONTEXTS + index - count)
                    said = f"{stories[at : at + _STORY]}\n\n{said}"
                messages.append({"role": "user", "content": said})
                messages += exchange(call, f"C{number:06}{step:02}", result_of(number, step))
            chains.append(len(tasks))
        members.append(Conversation(engine, messages, chains, text))
    return history, members


# -- the ways ----------------------------------------------------------------------------------------------------------

Histories = dict[Numbers, Context]  # what is cleared in them → what is read


def states_in_place(
    model: Transformer, read: Histories, history: Conversation, one: Conversation, edits: Sequence[Any]
) -> States:
    """The states of a conversation in which each token is read once. edits: as `Conversation.edits` yields them."""

    def read_to(context: Context, end: int) -> np.ndarray:
        hidden = []
        for position, holes in edits:
            if context.end <= position < end:
                hidden.append(context.read(one.ids[context.end : position]))
                context.remove(holes)
        return np.concatenate([*hidden, context.read(one.ids[context.end : end])])

    if not read:
        read[frozenset()] = Context(model)
        read_to(read[frozenset()], common_prefix(one.ids, history.ids))
    context = read[frozenset()].copy()
    first, hidden = context.end, read_to(context, one.place(one.count).stop)
    context.release()
    states = {number: states_of(hidden, one.place(number), first) for number in one.numbers}
    start = one.place(_LAST_BEFORE).stop - first
    return {**states, 0: hidden[start : start + _COMPARED]}


def states_of(hidden: np.ndarray, place: range, first: int) -> np.ndarray:
    """The states before each token of a place. hidden: of the tokens from `first` on."""
    return hidden[place.start - first - 1 : place.stop - first - 1]


def states_read_again(model: Transformer, read: Histories, history: Conversation, one: Conversation) -> States:
    """The states of a conversation whose prompts are read with placeholders."""
    states = States()
    for cleared in dict.fromkeys(map(one.cleared, one.numbers)):
        numbers = [number for number in one.numbers if one.cleared(number) == cleared]
        ids, in_history = one.prompt(cleared), frozenset(number for number in cleared if number <= history.count)
        if in_history not in read:
            read[in_history] = Context(model)
            read[in_history].read(ids[: common_prefix(ids, history.prompt(in_history))])
        context = read[in_history].copy()
        first = context.end
        hidden = context.read(ids[first : one.place(numbers[-1], cleared).stop])
        context.release()
        states |= {number: states_of(hidden, one.place(number, cleared), first) for number in numbers}
        if _LAST_BEFORE + 1 in numbers:
            start = one.place(_LAST_BEFORE, cleared).stop - first
            states[0] = hidden[start : start + _COMPARED]
    return states


# -- what is measured --------------------------------------------------------------------------------------------------


def measure(
    engine: Engine,
    model: Transformer,
    history: Conversation,
    members: Sequence[Conversation],
    result: Result,
    subject: str,
) -> Iterator[str]:
    """Add the rows of a history: calls of all conversations in order, and KL of some. Yields an arm for each
    conversation."""

    def logits(states: np.ndarray) -> np.ndarray:
        return model.logits(model.ops.to_device(states))

    after: dict[str, list[np.ndarray]] = {arm: [] for arm in ARMS}
    compared = [one for text in TEXTS for one in [one for one in members if one.text == text][:_CONTEXTS]]
    compared = [one for one in compared if one.is_long]
    for arm in ARMS:
        read, found = Histories(), list[tuple[bool, float]]()
        for one in members:
            if arm == READ_AGAIN:
                states = states_read_again(model, read, history, one)
            else:
                states = states_in_place(model, read, history, one, [*one.edits()] if arm == HOLES else [])
            if one in compared:
                after[arm].append(states[0])
            if one.text == OWN:
                found += [outcome(engine, logits(states[number]), *one.call(number)) for number in one.numbers]
            yield arm
        for context in read.values():
            context.release()
        for name, values in zip(("right", "logprob"), zip(*found, strict=True), strict=True):
            result.add(subject, arm, name, values)
    for first, second in PAIRS:
        both = [compare(logits(p), logits(q)) for p, q in zip(after[first], after[second], strict=True)]
        for text in TEXTS:
            runs = [float(each.kl.mean()) for one, each in zip(compared, both, strict=True) if one.text == text]
            result.add(subject, f"{first} ‖ {second}", f"kl, {text}", runs)
    result.add(subject, "all", "calls of chains", [calls for one in members if one.text == OWN for calls in one.chains])


def outcome(
    engine: Engine, logits: np.ndarray, tokens: Sequence[int], masks: Sequence[np.ndarray]
) -> tuple[bool, float]:
    """Whether greedy sampling writes a call, and the call's log-probability up to its last brackets, among what the
    grammar allows. logits (T, V): before each token."""
    for row, mask in zip(logits, masks, strict=True):
        row[~allowed_bits(mask, len(row))] = -np.inf
    # Other tokens of the same text, such as "}}" for "}}\n", are as right.
    is_right = all(
        one == token or engine.detokenize(tokens[at:]).startswith(engine.detokenize([one]) or "\0")
        for at, (one, token) in enumerate(zip(logits.argmax(axis=1).tolist(), tokens, strict=True))
    )
    end = next(at for at, token in enumerate(tokens) if "}" in engine.detokenize([token]))
    return is_right, float(log_softmax(logits[:end])[np.arange(end), tokens[:end]].sum())


def report_of(result: Result) -> Report:
    """The tables over all histories."""

    def runs(contestant: str, quantity: str) -> np.ndarray:
        rows = [figures[quantity].runs for _, who, figures in result.parts(prefix="history") if who == contestant]
        return np.concatenate(rows)

    def add_mean(subject: str, contestant: str, quantity: str, x: np.ndarray) -> None:
        error = float(x.std()) / math.sqrt(len(x)) if len(x) else None
        result.add(subject, contestant, quantity, x[:0], value=float(x.mean()) if len(x) else None, error=error)

    ends = runs("all", "calls of chains").astype(int).cumsum()
    right = {("calls", arm): runs(arm, "right") > 0 for arm in ARMS}
    right |= {("chains", arm): np.array([x.all() for x in np.split(right["calls", arm], ends[:-1])]) for arm in ARMS}
    for unit in ("chains", "calls"):
        for arm in ARMS:
            add_mean("solved", f"{unit}, {arm}", "right", right[unit, arm])
    for first, second in PAIRS:
        for unit in ("chains", "calls"):
            name, p, q = f"{unit}, {first} → {second}", right[unit, first], right[unit, second]
            add_mean("pairs", name, "points", 100 * (q.astype(float) - p))
            lost, won = int((p & ~q).sum()), int((q & ~p).sum())
            result.add_all("pairs", name, {"lost": lost, "won": won, "p": mcnemar(lost, won)})
        add_mean("pairs", name, "nats", runs(second, "logprob") - runs(first, "logprob"))
        for text in TEXTS:
            add_mean("kl", f"{first} ‖ {second}", f"kl, {text}", runs(f"{first} ‖ {second}", f"kl, {text}"))
    tables = [
        Table.of("", COLUMNS, [(who, figures) for _, who, figures in result.parts(subject)])
        for subject in ("solved", "pairs", "kl")
    ]
    return Report(
        title=f"Edited contexts: {result['model']}",
        lead=f"{len(ends)} chains after histories of {result['history_tokens']:,} tokens",
        sections=[Section("", [table]) for table in tables],
        about=provenance(result, is_timed=False),
        columns={column.name: column.says for column in COLUMNS},
    )


if __name__ == "__main__":
    sys.exit(main())
