"""A needle in a haystack: one sentence hidden in a long text, and a question about it at the end.

Each cell of the grid has its own needle. The answer is scored, not generated: the log-probability of its tokens after
the given start of the answer, and whether each of them is the most likely one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from polarlm.bench import report
from polarlm.bench.command import CacheType
from polarlm.bench.quality.reference import Reference
from polarlm.bench.quality.scores import SCORINGS
from polarlm.engine import Engine
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.requests.prompts import prompt_ids

_PLACES = ("harbour", "lighthouse", "library", "castle", "bakery", "observatory", "museum", "monastery")


@dataclass(frozen=True)
class Prompt:
    """The ids of one cell: the prompt up to the answer, and the answer."""

    length: int  # requested tokens, the most that ids and answer have together
    depth: int  # percent of the haystack before the needle
    ids: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Cell:
    """The result of one cache type on one prompt, with one scoring."""

    type: str
    scored_as: str
    length: int
    depth: int
    tokens: int  # tokens of the answer
    logprob: float  # sum over the tokens of the answer, nats
    correct: bool  # whether each is the most likely one


def hide(engine: Engine | Reference, haystack: Sequence[int], length: int, depth: int) -> Prompt:
    """A prompt of at most `length` tokens, with a needle at `depth` percent of the haystack's text (ids).

    It has the model's chat template if there is one; else the answer continues the text. Raises FlagError if the
    haystack is too short, or if the length leaves no room for a haystack.
    """
    drawn = random.Random(f"{length} {depth}")
    place, number = drawn.choice(_PLACES), drawn.randint(10_000, 99_999)
    beginning = f"The secret number of the {place} is"
    start = engine.tokenize(beginning)
    answer = engine.tokenize(f"{beginning} {number}")[len(start) :]

    def ids_with(text: str) -> list[int]:
        text = _insert(text, f"{beginning} {number}.", depth)
        if engine.model.template.is_default:
            prompt: str | list[dict[str, str]] = f"{text}\n\n"
        else:
            prompt = [{"role": "user", "content": f"{text}\n\nWhat is the secret number of the {place}?"}]
        return prompt_ids(prompt, engine.model) + start

    # A part of a text may have another number of tokens than it has within the whole text.
    count = length - len(answer) - len(ids_with(""))
    while True:
        if count < 1:
            raise FlagError(f"--needle-lengths {length}: there is no room for a haystack, give a larger length")
        if count > len(haystack):
            raise FlagError(f"--needle-lengths {length}: --text has only {len(haystack)} tokens")
        ids = ids_with(_detokenized(engine, haystack[:count]))
        excess = len(ids) + len(answer) - length
        if excess <= 0:
            return Prompt(length, depth, ids, answer)
        count -= excess


def _detokenized(engine: Engine | Reference, ids: Sequence[int]) -> str:
    """The text of ids, without an incomplete last character."""
    return engine.detokenize(ids).rstrip("\ufffd")


def _insert(text: str, needle: str, depth: int) -> str:
    """`text` with the needle between two sentences, after `depth` percent of it.

    >>> _insert("One. Two. Three. Four.", "Here.", 50)
    'One. Two. Three. Here. Four.'
    """
    wanted = len(text) * depth / 100
    sentences = [0, *(found.end() for found in re.finditer(r"[.!?]\s+", text))]
    at = next((start for start in sentences if start >= wanted), len(text))
    return " ".join(part for part in (text[:at].rstrip(), needle, text[at:].lstrip()) if part)


def find(reference: Reference, types: Sequence[CacheType], prompts: Sequence[Prompt]) -> list[Cell]:
    """The results of every prompt with every type, scored in both ways."""
    cells = []
    longest = max(len(prompt.ids) + len(prompt.answer) for prompt in prompts)
    with tqdm(total=len(types) * len(SCORINGS) * len(prompts), desc="Searching", unit="needle", disable=None) as bar:
        for cache_type in types:
            bar.set_postfix_str(cache_type.label)
            settings = {"ctx_size": longest, "kept_sequences": 0, **cache_type.settings()}
            with reference.open(encoding=cache_type.encoding, **settings) as engine:
                for scoring in SCORINGS:
                    for prompt in prompts:
                        cells.append(_answered(engine, cache_type.label, scoring, prompt))
                        bar.update()
    return cells


def _answered(engine: Engine, label: str, scoring: str, prompt: Prompt) -> Cell:
    count = len(prompt.answer)
    score = engine.score([*prompt.ids, *prompt.answer], every_token_coded=SCORINGS[scoring], logits=True)
    likeliest = score.logits[-count - 1 : -1].argmax(axis=-1)
    return Cell(
        type=label,
        scored_as=scoring,
        length=prompt.length,
        depth=prompt.depth,
        tokens=count,
        logprob=float(np.sum(score.logprobs[-count:], dtype=np.float64)),
        correct=likeliest.tolist() == prompt.answer,
    )


def format_grid(cells: Sequence[Cell]) -> str:
    """A table with a row for each type, scoring and length, and a column for each depth."""
    depths = sorted({cell.depth for cell in cells})
    rows: dict[tuple[str, str, int], dict[int, Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.type, cell.scored_as, cell.length), {})[cell.depth] = cell
    return report.table(
        ("cache type", "scored", "length", *(f"{depth} % deep" for depth in depths)),
        [(key[0], key[1], f"{key[2]:,}", *_marks(row, depths)) for key, row in rows.items()],
    )


def _marks(row: Mapping[int, Cell], depths: Sequence[int]) -> list[str]:
    return [f"{'found' if row[depth].correct else '—'} {row[depth].logprob:6.2f}" for depth in depths]


def retrieved(cells: Sequence[Cell], label: str) -> str:
    """The needles that a type finds as served, by length: "512 (5 of 5), 1,024 (4 of 5)"."""
    served = [cell for cell in cells if cell.type == label and not SCORINGS[cell.scored_as]]
    by_length: dict[int, list[bool]] = {}
    for cell in served:
        by_length.setdefault(cell.length, []).append(cell.correct)
    return ", ".join(f"{length:,} ({sum(found)} of {len(found)})" for length, found in by_length.items())
