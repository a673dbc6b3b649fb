"""`polarlm quality --kld-base FILE`: full precision in a file that llama.cpp reads, or from a file of llama.cpp."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from polarlm.bench.quality import kld_file
from polarlm.bench.quality.divergence import perplexity
from polarlm.bench.quality.inputs import LEAST_TOKENS, TOO_SHORT, QualityConfig, open_model, read_text
from polarlm.bench.quality.scores import MOST, choose
from polarlm.bench.quality.states import exact_states, logits_of
from polarlm.bench.quality.survey import Survey, arithmetic
from polarlm.bench.result import duration
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.cli.progress import counting
from polarlm.engine.errors import counted
from polarlm.engine.model.score import logprobs_of
from polarlm.model_loaders.config import ModelConfig


def read(path: str, config: ModelConfig, model: str) -> kld_file.KldFile:
    """Open --kld-base for a model. Raises EngineError, and FlagError if it is of another one."""
    base = kld_file.read(path)
    if base.vocabulary != config.vocab_size:
        raise FlagError(
            f"--kld-base {path} is of a model with {base.vocabulary:,} tokens in its vocabulary, and {model} has "
            f"{config.vocab_size:,}"
        )
    if base.ids.shape[1] > config.max_context:
        raise FlagError(
            f"--kld-base {path} has windows of {base.ids.shape[1]:,} tokens, and {model} a context of "
            f"{config.max_context:,}"
        )
    return base


def windows(ids: np.ndarray, bos_id: int | None) -> list[list[int]]:
    """The windows of a file's ids (windows, tokens) as the model reads them: BOS replaces the first id."""
    cut = [window.tolist() for window in ids]
    return cut if bos_id is None else [[bos_id, *window[1:]] for window in cut]


def write(options: QualityConfig, clock: Callable[[], float]) -> None:
    """Write full precision's log-probabilities to --kld-base. Raises FlagError, LoadError or EngineError."""
    started = clock()
    file = Path(str(options.kld_base))
    if file.exists():
        raise FlagError(f"--kld-base {file} exists: without TEXT it is read, and with one it would be overwritten")
    text = read_text(str(options.text))
    with open_model(options) as model:
        config, ops = model.config, arithmetic(model.source, options.threads)
    note(f"Loading {model.name}")
    survey = Survey(model.path, [], min(MOST, config.max_context), ops, note)
    try:
        ids = survey.tokenizer.tokenize(text)
        if survey.tokenizer.bos_id is not None:
            ids = [survey.tokenizer.bos_id, *ids]
        if len(ids) < LEAST_TOKENS:
            raise FlagError(TOO_SHORT.format(len(ids)))
        token_seconds = survey.token_seconds(ids, clock)
        plan = choose(max(0.0, 60 * options.minutes - (clock() - started)), token_seconds, len(ids), survey.context)
        cut = np.array(ids[: plan.count * plan.length]).reshape(plan.count, plan.length)
        size = kld_file.nbytes(plan.count, plan.length, config.vocab_size)
        note(
            f"{counted(plan.count, 'window')} of {plan.length:,} tokens: {size / 1e6:,.0f} MB in {file}, in about "
            f"{duration(plan.seconds)}"
        )
        _check_room(file, size)
        logprobs = _write(file, survey, config.vocab_size, cut)
    finally:
        survey.close()
    print(f"{file}: perplexity {perplexity(logprobs):.4f} of {len(logprobs):,} tokens, the second half of each window")
    note(
        f"polarlm quality --kld-base {file} scores cache types against it, and llama-perplexity --kl-divergence "
        f"--kl-divergence-base {file} -c {plan.length} its own"
    )


def _check_room(file: Path, size: int) -> None:
    try:
        free = shutil.disk_usage(file.parent).free
    except OSError as error:
        raise FlagError(f"--kld-base {file} cannot be written: {error.strerror}") from None
    if size > free:
        raise FlagError(
            f"--kld-base {file} would take {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there: give fewer "
            "--minutes or a shorter text"
        )


def _write(file: Path, survey: Survey, vocabulary: int, ids: np.ndarray) -> np.ndarray:
    """Write the windows ids (windows, tokens), and return the log-probabilities of the ids that rows predict."""
    model, first = survey.reference, ids.shape[1] // 2
    logprobs = []
    with kld_file.KldWriter(file, vocabulary, ids.tolist()) as writer, counting("Writing", "window", len(ids)) as count:
        for window in windows(ids, survey.tokenizer.bos_id):
            hidden, at = exact_states(model, window), first + 1
            for logits in logits_of(model, hidden[first:-1]):
                writer.add(logits)
                logprobs.append(logprobs_of(logits, window[at : at + len(logits)]))
                at += len(logits)
            count("")
    return np.concatenate(logprobs)
