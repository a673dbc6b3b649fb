"""`polarlm quality` of cache types: windows of a text, texts that the model writes, then speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polarlm import model_loaders
from polarlm.bench import report
from polarlm.bench.command import CacheType, cache_types
from polarlm.bench.quality import answers, kld_base, page
from polarlm.bench.quality.budget import MOST, Windows, choose, of_length
from polarlm.bench.quality.inputs import (
    DEFAULT_TYPES,
    LEAST_TOKENS,
    TOO_SHORT,
    QualityConfig,
    model_files,
    page_file,
    read_text,
)
from polarlm.bench.quality.scores import windows
from polarlm.bench.quality.speeds import Rates, Speeds
from polarlm.bench.quality.survey import Survey, arithmetic
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.cli.progress import counting
from polarlm.engine.config import EngineConfig
from polarlm.engine.loading.fit import CacheFit, devices, fit_weights
from polarlm.engine.loading.placement.wanted import Sizes, Wanted
from polarlm.engine.model.weights import weight_bytes
from polarlm.model_loaders.config import ModelConfig

_SPEED_SHARE = 0.2  # share of the time for measuring speed
_ANSWERS_SHARE = 0.2  # and for texts of the model's own
_LEAST_ANSWER = 100  # tokens, as far as the context allows
_PROBE = 128  # tokens of the window from which the time is estimated
_WRITTEN_EVERY = 15  # seconds

Clock = Callable[[], float]


def measure(options: QualityConfig, argv: Sequence[str], clock: Clock) -> None:
    """Measure for `options.minutes`, write the page and its JSON, and print the tables. clock: returns seconds.

    Raises FlagError, LoadError or EngineError, and KeyboardInterrupt after writing what was measured.
    """
    _Measurement(options, argv, clock).run()


class _Measurement:
    """One run of the command."""

    def __init__(self, options: QualityConfig, argv: Sequence[str], clock: Clock) -> None:
        """Raises FlagError or LoadError for mistakes that can be found before a model is loaded."""
        self._clock, self._started, self._argv = clock, clock(), argv
        self._options = options
        text = options.text
        self._text = "" if text is None else read_text(text)
        self._seconds = 60 * self._options.minutes
        self._path, name = model_files(self._options.weights)
        config, source, dtype = model_loaders.load_weights(self._path)
        try:
            self._base = kld_base.read(str(self._options.kld_base), config, name) if text is None else None
            self._types = _chosen(self._options.types, config)
            self._file = page_file(self._options.output, name)
            self._ops = arithmetic(source, self._options.threads)
            device, ops = devices(self._options.device, self._options.threads)[0]
            size = weight_bytes(ops, source)
            self._fits = {one.label: _fit(one, ops, config, size) for one in self._types}
        finally:
            source.close()
        self._config, self._device = config, device
        self._about: dict[str, Any] = {
            "model": name,
            "weights": dtype,
            "text": "standard input" if text == "-" else Path(text or str(self._options.kld_base)).name,
            "full_precision": "prefill" if self._base is None else "file",
            "arithmetic": "float32" if isinstance(self._ops, NumpyOps) else "compiled kernels",
            "device": device,
            "budget_minutes": self._options.minutes,
        }
        self._answers: dict[str, answers.Answer] = {}
        self._rates: dict[str, Rates] = {}
        self._written = -math.inf  # time of the last write

    def run(self) -> None:
        """Measure and write the page. Raises EngineError, and KeyboardInterrupt after writing what was measured."""
        note(f"Loading {self._about['model']} with {len(self._types)} cache types")
        length = MOST if self._base is None else self._base.ids.shape[1]
        context = min(max(length, answers.PROMPT + answers.MOST), self._config.max_context)
        survey = Survey(self._path, self._types, context, self._ops, note)
        try:
            ids = survey.tokenize(self._text) if self._base is None else self._base.ids.ravel().tolist()
            if len(ids) < LEAST_TOKENS:
                raise FlagError(TOO_SHORT.format(len(ids)))
            self._quality(survey, ids)
            self._answer(survey, ids)
        finally:
            survey.close()
        del survey  # frees its weights before the engine loads its own
        self._measure_speed(ids)
        self._write(complete=True)
        print(page.table(self._result))
        note(f"The page: {self._file}, its figures: {self._file.with_suffix('.json')}")

    # -- quality -----------------------------------------------------------------------------------------------

    def _quality(self, survey: Survey, ids: Sequence[int]) -> None:
        """Score windows until their share of the time is over."""
        plan = self._plan(survey, ids)
        base = self._base
        cut = windows(ids, plan.length, survey.bos_id) if base is None else kld_base.windows(base.ids, survey.bos_id)
        cut = cut[: plan.count]
        self._about |= {"window": plan.length, "planned_windows": len(cut)}
        each = plan.seconds / plan.count
        try:
            total = len(cut) * (1 + len(self._types))
            with counting("Scoring", "pass", total) as count:
                for number, window in enumerate(cut):
                    if number and self._clock() + each > self._until_answers:
                        note(f"{number} of {len(cut)} windows were scored in the time there is")
                        break
                    started = self._clock()
                    for _ in survey.score(window) if base is None else survey.score_against(base, number, window):
                        count("")
                    each = self._clock() - started
                    self._keep(survey)
        except BaseException:
            if survey.windows:
                self._take(survey)
                self._stopped()
            raise
        self._take(survey)

    def _plan(self, survey: Survey, ids: Sequence[int]) -> Windows:
        """The windows that there is time for, estimated from a short window. Prints a note."""
        probe = windows(ids[:_PROBE], _PROBE, survey.bos_id)[0]
        list(survey.score(probe, keep=False))  # the first run takes longer
        started = self._clock()
        list(survey.score(probe, keep=False))
        taken = self._clock() - started
        seconds, token_seconds = max(0.0, self._until_answers - self._clock()), taken / len(probe)
        if self._base is None:
            plan = choose(seconds, token_seconds, len(ids), survey.context)
        else:
            count, length = self._base.ids.shape
            if survey.context < length:
                raise FlagError(
                    f"--kld-base: windows of {length:,} tokens, and memory has room for {survey.context:,} in f16"
                )
            plan = of_length(length, seconds, token_seconds, count)
        rest = self._until_speed - self._until_answers, _SPEED_SHARE * self._seconds
        late = "" if plan.seconds <= seconds else f" (--minutes leaves {report.duration(seconds)})"
        text = ", all of the text" if plan.count * plan.length > len(ids) - plan.length else ""
        note(
            f"{len(self._types)} cache types on {_counted(plan.count, 'window')} of {plan.length:,} tokens{text}: "
            f"about {report.duration(plan.seconds)}{late}, and {report.duration(rest[0])} for texts of their own, "
            f"{report.duration(rest[1])} at most for speed. "
            f"Ctrl-C keeps what was measured, in {self._file}"
        )
        return plan

    @property
    def _until_answers(self) -> float:
        """The time at which scoring the text must end."""
        return self._until_speed - _ANSWERS_SHARE * self._seconds

    @property
    def _end(self) -> float:
        return self._started + self._seconds

    @property
    def _until_speed(self) -> float:
        """The time at which measuring quality must end."""
        return self._started + (1 - _SPEED_SHARE) * self._seconds

    def _keep(self, survey: Survey) -> None:
        """Write what was scored so far from time to time, since errors and drawing take a second."""
        if self._clock() - self._written >= _WRITTEN_EVERY:
            self._take(survey)
            self._write(complete=False)

    def _take(self, survey: Survey) -> None:
        self._quality_so_far, self._about["windows"] = survey.quality(), survey.windows

    # -- texts of the model's own ------------------------------------------------------------------------------

    def _answer(self, survey: Survey, ids: Sequence[int]) -> None:
        """Let each type continue the text until its share of the time is over; until all of it is, for a few tokens."""
        start = [] if survey.bos_id is None else [survey.bos_id]
        prompt = [*start, *ids[: answers.PROMPT - len(start)]]
        most = min(answers.MOST, survey.context - len(prompt))
        if most < 1:
            return
        texts = survey.answers(prompt)
        try:
            with counting("Continuing", "token", most) as count:
                for number, _ in enumerate(texts.write(most), 1):
                    count("")
                    if self._clock() > (self._until_speed if number >= _LEAST_ANSWER else self._end):
                        break
        except BaseException:
            self._stopped()
            raise
        labels = [one.label for one in self._types]
        self._answers = dict(zip(labels, texts.judged(), strict=True))

    # -- speed -------------------------------------------------------------------------------------------------

    def _measure_speed(self, ids: Sequence[int]) -> None:
        """Measure the speed of each type, in rounds while there is time."""
        settings = {"device": self._device, "threads": self._options.threads}
        speeds = Speeds(self._path, self._types, ids, settings, self._clock)
        try:
            with counting("Speed", "run") as count:
                for _ in speeds.measure(self._end):
                    count(f"{report.duration(max(0.0, self._end - self._clock()))} left")
        except BaseException:
            self._rates, self._about["speed_context"] = speeds.rates(), speeds.prompt_tokens
            self._stopped()
            raise
        self._rates, self._about["speed_context"] = speeds.rates(), speeds.prompt_tokens

    # -- results -----------------------------------------------------------------------------------------------

    def _stopped(self) -> None:
        self._write(complete=False)
        note(f"What was measured is in {self._file}")

    def _write(self, *, complete: bool) -> None:
        """Write the page and its JSON. Raises EngineError."""
        quality = asdict(self._quality_so_far)
        for row in quality["rows"]:
            del row["attention_error"]
            row["pair"] = next(one.pair for one in self._types if one.label == row["type"])
            row["fit"] = asdict(self._fits[row["type"]])
            rates = self._rates.get(row["type"])
            answer = self._answers.get(row["type"])
            row["answer"] = None if answer is None else asdict(answer)
            row["speed"] = None if rates is None else asdict(rates)
        self._result = report.write(
            self._file.with_suffix(".json"),
            "quality",
            self._argv,
            {**self._about, **quality, "seconds": round(self._clock() - self._started, 1)},
            complete=complete,
            program=("polarlm", "quality"),
        )
        page.write(self._file, self._result)
        self._written = self._clock()


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


def _chosen(text: str, config: ModelConfig) -> list[CacheType]:
    """The types of --types. Default types that do not support the model's head dim are left out, with a note.

    Raises FlagError.
    """
    found = []
    for one in cache_types(text, by_layer=True):
        try:
            one.check(config.attention.head_dim)
        except FlagError as error:
            if text != DEFAULT_TYPES:
                raise
            note(f"{one.label} is left out. {str(error).partition(': ')[2]}")
        else:
            found.append(one)
    return found


def _fit(one: CacheType, ops: Any, config: ModelConfig, size: int) -> CacheFit:
    settings = EngineConfig(cache_type=one.pair, key_conditioning=one.key_conditioning)
    return fit_weights(Wanted(settings, config, Sizes(size)), ops, [one.pair]).caches[0]
