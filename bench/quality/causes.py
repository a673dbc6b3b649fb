"""`python -m polarlm.bench.quality.causes`: which codes cause the divergence of a cache type, by depth in a text.

At each depth the next tokens are computed several times after the same prompt in full precision, parts of which are
replaced by what their codes decode to: all complete blocks, only keys or only values, only the newest 256 tokens or
only older ones. "As served" computes the same tokens after steps over the whole text, which also has the error that
steps add: they compute keys and values from codes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from polarlm.bench import report
from polarlm.bench.command import HF_REPO_HELP, WEIGHTS_HELP, CacheType, at_least, model_named
from polarlm.bench.plot_labels import spread
from polarlm.bench.plot_style import NO_PICTURES, STYLE, can_draw, panels, plain_log, save
from polarlm.bench.quality.coded_prompt import CodedPrompt, whole_store
from polarlm.bench.quality.divergence import compare
from polarlm.bench.quality.scores import small, windows
from polarlm.bench.quality.states import exact_states, served_states
from polarlm.bench.report import Output
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Array
from polarlm.engine.cli.commands import command, note
from polarlm.engine.cli.flags import FlagError, parse
from polarlm.engine.config import EngineConfig, setting
from polarlm.engine.loading.assembly import assemble
from polarlm.engine.loading.checks import settle
from polarlm.engine.model.forward import Transformer
from polarlm.engine.state.store import KVStore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NEWEST = 256  # tokens
_CHUNKS = 2  # blocks of tokens to compute at each depth
_FIRST = 128  # depth; each further one is twice as deep
SERVED, ALL = "as served", "all codes"
_COLOURS = {SERVED: "#111827", ALL: "#c2410c", "keys": "#1d4ed8", "values": "#0d9488", "newest": "#7c3aed"}
_COLOURS |= {"older": "#a16207"}


@dataclass(frozen=True)
class Options:
    """The flags: the text, the model and the cache type."""

    text: str | None = setting(None, "--text", metavar="FILE", help="UTF-8 text; this flag is needed")
    weights: str | None = setting(None, "--weights", "-m", metavar="PATH", help=WEIGHTS_HELP)
    hf_repo: str | None = setting(None, "-hf", "--hf-repo", metavar="USER/REPO[:QUANT]", help=HF_REPO_HELP)
    type: str = setting("balanced", "--type", metavar="TYPE", help="the cache type, as bench.quality takes it")
    windows: int = setting(2, "--windows", metavar="N", help="windows of the text, from its start")
    window: int = setting(8192, "--window", metavar="N", help="tokens of a window")


@dataclass
class Depth:
    """The figures at one depth. Lists have a number per position of all windows; those of `errors`, one per block."""

    tokens: int  # tokens before the first position
    kl: dict[str, list[float]] = field(default_factory=dict)  # nats
    on_codes: list[float] = field(default_factory=list)  # share of attention on codes, mean of all heads and layers
    errors: dict[str, list[float]] = field(default_factory=dict)  # relative, of keys and values since the last depth


def measure(coded: Transformer, store: KVStore, cut: Sequence[Sequence[int]]) -> list[Depth]:
    """The figures of all windows, which have equal lengths. store: from `whole_store`."""
    block, length = coded.store.shape.block_size, len(cut[0])
    depths, tokens = [], _FIRST
    while tokens + _CHUNKS * block <= length:
        depths.append(Depth(tokens))
        tokens *= 2
    with tqdm(total=len(cut) * (2 + len(depths)), desc="Computing", unit="part", disable=None) as bar:
        for window in cut:
            prompt = CodedPrompt(coded, store)
            exact = exact_states(prompt.model, window)
            bar.update()
            served = served_states(coded, window)
            bar.update()
            for depth in depths:
                for first in range(depth.tokens, depth.tokens + _CHUNKS * block, block):
                    rows = slice(first, first + block)
                    both = (model.logits(states[rows]) for model, states in ((prompt.model, exact), (coded, served)))
                    depth.kl.setdefault(SERVED, []).extend(compare(*both).kl.tolist())
                    for name, errors in prompt.grow(window[:first]).items():
                        depth.errors.setdefault(name, []).extend(errors)
                    _compare(prompt, window[rows], first, depth)
                bar.update()
            prompt.release()
    return depths


def _compare(prompt: CodedPrompt, ids: Sequence[int], length: int, depth: Depth) -> None:
    """Add the figures of `ids`, the block after a prompt of `length` tokens."""
    block, none = len(ids), slice(0, 0)
    parts: dict[tuple[str, int], dict[int, np.ndarray]] = {}  # (name, layer) → first position → rows from there

    def taps(name: str, layer: int, position: int, x: Array) -> None:
        if name in ("queries", "keys"):
            parts.setdefault((name, layer), {})[position] = x.copy()

    def seen(name: str, layer: int) -> np.ndarray:
        rows = parts[name, layer]
        return np.concatenate([rows[position] for position in sorted(rows)])

    exact = prompt.logits(ids, none, none, taps)
    shares = [prompt.share(seen("queries", i), seen("keys", i), i) for i in range(len(prompt.model.config.layers))]
    depth.on_codes += np.mean(shares, axis=0).tolist()
    every, middle = slice(block, length), max(block, length - _NEWEST)
    newest, older = slice(middle, length), slice(block, middle)
    read = {ALL: (every, every), "keys": (every, none), "values": (none, every), "newest": (newest, newest)}
    for name, coded in (read | {"older": (older, older)}).items():
        depth.kl.setdefault(name, []).extend(compare(exact, prompt.logits(ids, *coded)).kl.tolist())


def summary(depth: Depth) -> dict[str, Any]:
    """The means of a depth's figures, with the standard error of each KL."""
    kl = {name: (float(np.mean(x)), float(np.std(x) / np.sqrt(len(x)))) for name, x in depth.kl.items()}
    return {
        "tokens": depth.tokens,
        "positions": len(depth.on_codes),
        "kl": {name: {"mean": mean, "error": error} for name, (mean, error) in kl.items()},
        "on_codes": float(np.mean(depth.on_codes)),
        "errors": {name: float(np.mean(x)) for name, x in depth.errors.items()},
    }


def format_table(found: Sequence[Mapping[str, Any]]) -> str:
    """A table with a row for each depth."""
    names = list(found[0]["kl"])
    header = ["tokens before", *(f"KL, {name}" for name in names), "attention on codes", "key error", "value error"]
    rows = [
        [
            f"{depth['tokens']:,}",
            *(f"{small(depth['kl'][name]['mean'])} ± {small(depth['kl'][name]['error'])}" for name in names),
            f"{100 * depth['on_codes']:.0f} %",
            *(f"{100 * error:.2f} %" for error in depth["errors"].values()),
        ]
        for depth in found
    ]
    return report.table(header, rows)


def draw(found: Sequence[Mapping[str, Any]], name: str) -> Figure:
    """A figure of each part's KL, and of the share of attention that reads codes, over the depth."""
    figure, ((left, right),) = panels(2, 1, (5.2, 4.2))
    at = [depth["tokens"] for depth in found]
    for part, colour in _COLOURS.items():
        seen = [(tokens, kl) for tokens, depth in zip(at, found, strict=True) if (kl := depth["kl"][part]["mean"]) > 0]
        if seen:
            left.plot(*zip(*seen, strict=True), "o-", ms=3.5, color=colour, lw=1.2)
    right.plot(at, [100 * depth["on_codes"] for depth in found], "o-", ms=3.5, color=_COLOURS[ALL], lw=1.2)
    right.set_ylim(0, 100)
    for ax, title in ((left, "KL, nats (mean)"), (right, "attention on codes, %")):
        ax.set_xscale("log")
        ax.set_xticks(at, [f"{tokens:,}" for tokens in at])
        ax.minorticks_off()
        ax.set_xlabel("tokens before")
        ax.set_title(title)
    plain_log(left)
    ends = {part: kl for part in _COLOURS if (kl := found[-1]["kl"][part]["mean"]) > 0}
    spread(left, list(ends.values()), list(ends), [_COLOURS[part] for part in ends])
    figure.suptitle(f"Where the divergence comes from: {name}", fontweight="bold")
    return figure


@command
def main(argv: Sequence[str]) -> None:
    """Measures, writes JSON and a picture, prints the table."""
    options, destination = parse(
        argv,
        {"Causes": Options, "Output": Output},
        prog="python -m polarlm.bench.quality.causes",
        description="Which codes the divergence of a cache type comes from, by depth in a text.",
        checks={"windows": at_least(1), "window": at_least(_FIRST + _CHUNKS * EngineConfig().block_size)},
    )
    one = CacheType.read(options.type)
    if options.text is None:
        raise FlagError("--text is missing: give a UTF-8 text file, such as the test part of WikiText-2")
    try:
        text = Path(options.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FlagError(f"--text {options.text} cannot be read as UTF-8 text: {error}") from None
    ops, settings = NumpyOps(), {"ctx_size": options.window, "kept_sequences": 0, "parallel": 1, **one.settings()}
    parts = assemble(settle(model_named(options.weights, options.hf_repo), None, settings), note, ops=ops)
    try:
        coded, source = parts.model, parts.source
        if any(window is not None for window, _ in coded.store.shape.groups):
            raise FlagError(f"{source.name} has sliding windows, in which blocks have no depth: take another model")
        one.check(source.config.attention.head_dim)
        output = destination.path("causes", f"{source.name} {one.label}")
        ids = source.tokenizer.tokenize(text)
        cut = windows(ids, options.window, source.tokenizer.bos_id)[: options.windows]
        if len(cut[-1]) < options.window:
            raise FlagError(f"--text {options.text} is too short for {options.windows} windows of {options.window}")
        found = [summary(depth) for depth in measure(coded, whole_store(coded, settings), cut)]
    finally:
        parts.close()
    about = {"model": source.name, "type": one.label, "text": Path(options.text).name, "window": options.window}
    report.write(output, "quality.causes", argv, {**about, "windows": len(cut), "depths": found})
    note(f"Written to {output}")
    if can_draw():
        from matplotlib import rc_context

        with rc_context(STYLE):
            save(draw(found, f"{source.name}, {one.label}"), output.with_suffix(".png"))
    else:
        note(NO_PICTURES)
    print(
        f"{source.name} on {about['text']}, {len(cut)} windows of {options.window} tokens, {one.label}. KL from full "
        f"precision in nats, of the {_CHUNKS} blocks after so many tokens.\n"
    )
    print(format_table(found))


if __name__ == "__main__":
    sys.exit(main())
