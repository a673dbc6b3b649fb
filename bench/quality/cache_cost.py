"""`polarlm quality` of cache types: windows of a text, then speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from polarlm.bench.command import CacheType
from polarlm.bench.quality import types as compared
from polarlm.bench.quality.inputs import (
    LEAST_TOKENS,
    PROGRAM,
    TOO_SHORT,
    QualityConfig,
    open_model,
    page_file,
    read_texts,
)
from polarlm.bench.quality.scores import (
    MOST,
    Windows,
    by_turns,
    choose,
    window_seconds,
    windows,
    windows_of_length,
)
from polarlm.bench.quality.speeds import Speeds
from polarlm.bench.quality.survey import Survey, arithmetic
from polarlm.bench.quality.tables import ROOM, report_of
from polarlm.bench.result import Result, ResultWriter, digest_of_text, duration
from polarlm.bench.runner import Clock, WorkloadRunner
from polarlm.engine.backends.select import select
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.cli.progress import counting
from polarlm.engine.config import AS_STORED, EngineConfig
from polarlm.engine.errors import EngineError, counted
from polarlm.engine.loading.checks import settle
from polarlm.engine.loading.encoding import FULL_ENCODING
from polarlm.engine.loading.fit import CacheFit, devices, fit_weights
from polarlm.engine.loading.placement.request import PlacementRequest, Sizes
from polarlm.engine.loading.sizes import weight_format
from polarlm.engine.model.weights import weight_bytes
from polarlm.model_loaders.config import ModelConfig

_SPEED_SHARE = 0.2  # share of the time for measuring speed
_FIRST = 3  # types that are loaded before a window is scored; the others only where there is time for them
_COMPARED = 2  # types that are loaded and scored however long that takes


def measure(options: QualityConfig, argv: Sequence[str], clock: Clock) -> None:
    """Measure for `options.minutes`, write the page and its JSON, also after Ctrl-C, and print the tables."""
    _Measurement(options, argv, clock).run()


class _Measurement:
    """One run of the command."""

    def __init__(self, options: QualityConfig, argv: Sequence[str], clock: Clock) -> None:
        """Raises FlagError or LoadError for mistakes that can be found before a model is loaded."""
        self._runner = WorkloadRunner(60 * options.minutes, self._write, clock)
        self._options = options
        self._texts = read_texts(str(options.text))
        self._is_counted = options.windows > 0  # the windows are given, and nothing else is measured
        converted = weight_format(settle(None, None, {"weight_type": options.weight_type}))
        with open_model(options.weights, options.hf_repo) as model:
            config = model.config
            self._types = compared.choose_types(options.types, options.ablate, config)
            subject = f"{model.name} {' '.join(Path(name).stem for name in self._texts)}"
            self._writer = ResultWriter(page_file(options.output, subject), "quality", argv, program=PROGRAM)
            self._ops = (  # float32 takes ten times as long, for figures that others can repeat
                arithmetic(model.source, options.threads, converted)
                if self._is_counted
                else select("cpu", options.threads)[0]
            )
            device, ops = devices(options.device, options.threads)[0]
            size = weight_bytes(ops, model.source, converted)
            fits = {cache_type.label: _fit(cache_type, ops, config, size) for cache_type in self._types}
            self._path = model.path
        self._config, self._device = config, device
        about: dict[str, Any] = {
            "model": model.name,
            "weights": model.dtype if options.weight_type == AS_STORED else f"{model.dtype} as {options.weight_type}",
            "text": ", ".join(self._texts),
            "arithmetic": "float32" if self._ops.backend == "numpy" else "compiled kernels",
            "device": device,
            "budget_minutes": options.minutes,
            **model.digest,
            **digest_of_text("".join(self._texts.values())),
        }
        self._result = Result(about)
        for label, fit in fits.items():
            if fit.problem:
                self._result.add(ROOM, label, "tokens", failure=fit.problem)
            else:
                sizes = {name: getattr(fit, name) for name in ("bits_per_value", "bytes_per_token", "tokens")}
                self._result.add_all(ROOM, label, sizes)
        self._load_seconds = 0.0  # of the type that took longest
        self._pass_seconds = 0.0  # of a token of a window, as full precision or a type computes it
        self._until_speed = self._runner.share(_SPEED_SHARE)  # when scoring the text must end

    def run(self) -> None:
        """Measure and write the page. Raises EngineError, and KeyboardInterrupt after writing what was measured."""
        try:
            with self._runner.final_write():
                self._measure()
        except BaseException:
            if self._has_windows:
                note(f"What was measured is in {self._page}")
            raise
        report_of(self._result).show(self._writer.path)

    @property
    def _page(self) -> Path:
        return self._writer.path.with_suffix(".html")

    @property
    def _has_windows(self) -> bool:
        return bool(self._result.about.get("windows"))

    def _measure(self) -> None:
        note(f"Loading {self._result['model']}")
        length = self._options.window or MOST
        if length > self._config.max_context and self._options.window:
            raise FlagError(
                f"--window {length} is more than the {self._config.max_context} tokens of context that "
                f"{self._result['model']} has"
            )
        survey = Survey(
            self._path,
            self._types if self._is_counted else [],
            min(length, self._config.max_context),
            self._ops,
            note,
            weight_type=self._options.weight_type,
            every_token_coded=self._options.every_token_coded,
        )
        try:
            texts = {name: survey.tokenizer.tokenize(text) for name, text in self._texts.items()}
            ids = [*chain.from_iterable(texts.values())]
            if (least := min(map(len, texts.values()))) < LEAST_TOKENS:
                raise FlagError(TOO_SHORT.format(least))
            self._quality(survey, ids, texts)
            self._types = survey.types
        finally:
            survey.close()
        del survey  # frees its weights before the engine loads its own
        if not self._is_counted:
            self._measure_speed(ids)

    # -- quality -----------------------------------------------------------------------------------------------

    def _quality(self, survey: Survey, ids: Sequence[int], texts: Mapping[str, Sequence[int]]) -> None:
        later = [] if self._is_counted else [*self._types]
        while later and len(survey.types) < _FIRST and (len(survey.types) < _COMPARED or self._seconds_to_score):
            self._load(survey, later.pop(0))
        plan = self._plan(survey, ids)
        bos_id = survey.tokenizer.bos_id
        cut = by_turns({name: windows(own, plan.length, bos_id) for name, own in texts.items()})
        cut = cut[: plan.count if self._is_counted else max(1, len(ids) // plan.length)]
        if plan.count < len(texts):
            note(f"There is time for {counted(plan.count, 'window')} of {len(texts)} texts: give more --minutes")
        self._result.about |= {"window": plan.length, "planned_windows": plan.count}
        try:
            total = len(cut) * survey.passes if self._is_counted else None
            with counting("Scoring", "pass", total) as count:
                for number, (kind, window) in enumerate(cut):
                    each = self._pass_seconds * survey.passes * len(window)
                    if number and not self._is_counted and each > self._seconds_to_score:
                        break
                    passes = survey.score(window, kind=kind)
                    if number == 0:  # later, figures change with whole windows
                        passes = self._first_window(survey, passes, later, window, is_only=len(cut) == 1)
                    for _ in passes:
                        count("" if self._is_counted else self._time_left(self._until_speed))
                        if number == 0:
                            self._runner.keep(lambda: self._take(survey))
                    self._runner.keep(lambda: self._take(survey))
        finally:
            self._take(survey)
            if self._has_windows:
                self._result.about["warnings"] = self._warnings(len(ids))

    def _load(self, survey: Survey, cache_type: CacheType) -> None:
        """Load a type, unless memory has no room for it beside those that are compared anyway."""
        started = self._runner.seconds
        try:
            survey.add_type(cache_type)
        except EngineError as error:
            if error.code != "out_of_memory" or len(survey.types) < _COMPARED:
                raise
            note(f"{cache_type.label} is left out. {error}")
        self._load_seconds = max(self._load_seconds, self._runner.seconds - started)

    def _first_window(
        self, survey: Survey, passes: Iterator[None], later: list[CacheType], window: Sequence[int], *, is_only: bool
    ) -> Iterator[None]:
        """The passes of the first window, which tell how long one takes: further types are loaded while there is time
        for them and for a second window of all. is_only: whether there is no second one."""
        started = self._runner.seconds
        for done, _ in enumerate(passes, 1):
            each = max(self._runner.seconds - started, self._pass_seconds * len(window))
            self._pass_seconds = each / len(window)
            yield
            of_type = (survey.passes - 1) // len(survey.types)
            if not self._is_counted and done > _COMPARED * of_type and not self._runner.seconds_left():
                return
            while done == survey.passes and later:
                again = 0 if is_only else survey.passes + of_type
                if self._load_seconds + (of_type + again) * each > self._seconds_to_score:
                    break
                self._load(survey, later.pop(0))
            started = self._runner.seconds

    @property
    def _seconds_to_score(self) -> float:
        """Until the time for scoring the text ends."""
        return self._runner.seconds_left(self._until_speed)

    def _warnings(self, text_tokens: int) -> list[str]:
        """Sentences about what the figures lack. text_tokens: of all texts."""
        result, warnings = self._result, []
        scored = {one["type"] for one in result["types"].values()}
        if missing := [one.label for one in self._types if one.label not in scored]:
            are, them = ("is", "it") if len(missing) == 1 else ("are", "them")
            more = f"give more --minutes, or name {them} first in --types"
            warnings.append(f"{', '.join(missing)} {are} left out: {more}.")
        more = "more --windows" if self._is_counted else "more --minutes"
        more = "a longer text" if text_tokens < 2 * result["window"] else more
        single = result["windows"] < 2
        if result["window"] < min(MOST, self._config.max_context):
            why = f"The text has {text_tokens:,} tokens. " if text_tokens == result["window"] else ""
            warnings.append(
                f"{why}Windows of {result['window']:,} tokens tell less than those of {MOST:,}, since the first 64 of "
                f"a window and its newest are never codes{', and a single window has no ±' if single else ''}. For "
                f"figures that mean more give {more}."
            )
        elif single:
            warnings.append(f"A single window has no ±: give {more}.")
        return warnings

    def _plan(self, survey: Survey, ids: Sequence[int]) -> Windows:
        """The windows that there is time for, estimated from a short window. Prints a note."""
        token_seconds = survey.token_seconds(ids, lambda: self._runner.seconds)
        seconds = self._seconds_to_score
        length, most = self._options.window, len(ids)
        if self._is_counted:
            length = min(length or MOST, survey.context, most)
            count = min(self._options.windows, -(-most // length))
            plan = Windows(count, length, count * window_seconds(token_seconds, length))
        else:  # a first window may take all the time, since shorter ones tell little
            longest = choose(self._runner.seconds_left(), token_seconds, most, survey.context).length
            length = min(length, survey.context, most) or longest
            plan = windows_of_length(length, seconds, token_seconds, most // length)
        self._say_plan(survey, plan, seconds, most)
        return plan

    def _say_plan(self, survey: Survey, plan: Windows, seconds: float, most: int) -> None:
        """Print a note. seconds: that there are for scoring; most: tokens of the text."""
        text = ", all of the text" if plan.count * plan.length > most - plan.length else ""
        types = counted(len(self._types), "cache type")
        if len(survey.types) < len(self._types):
            types = f"{len(survey.types)} of {types} first,"
        windows = f"{types} on {counted(plan.count, 'window')}"
        scoring = f"{windows} of {plan.length:,} tokens{text}: about {duration(plan.seconds)}"
        if not self._is_counted:
            late = "" if plan.seconds <= seconds else f" (--minutes leaves {duration(seconds)})"
            scoring += f"{late}, and {duration(self._runner.end - self._until_speed)} at most for speed"
        note(f"{scoring}. Ctrl-C keeps what was measured, in {self._page}")

    def _take(self, survey: Survey) -> None:
        if survey.windows:
            survey.add_to(self._result)

    # -- speed -------------------------------------------------------------------------------------------------

    def _measure_speed(self, ids: Sequence[int]) -> None:
        options = self._options
        settings = {"device": self._device, "threads": options.threads, "weight_type": options.weight_type}
        whole = [cache_type for cache_type in self._types if cache_type.encoding == FULL_ENCODING]
        if not whole or self._runner.seconds_left() < self._load_seconds:
            return
        speeds = Speeds(self._path, whole, ids, settings, self._runner.seconds_left)
        try:
            with counting("Speed", "run") as count:
                for _ in speeds.measure():
                    count(self._time_left(self._runner.end))
                    self._runner.keep(lambda: speeds.add_to(self._result))
                    if not self._runner.seconds_left():
                        break
        finally:
            speeds.add_to(self._result)

    def _time_left(self, end: float) -> str:
        return f"{duration(self._runner.seconds_left(end))} left at most"

    def _write(self, complete: bool) -> bool:
        """Write the JSON, and the page of an incomplete result, once there is a window."""
        if not self._has_windows:
            return False
        self._result.about["seconds"] = round(self._runner.seconds, 1)
        self._writer.write(self._result, complete=complete)
        if not complete:
            report_of(self._result).write_page(self._page)
        return True


def _fit(cache_type: CacheType, ops: Any, config: ModelConfig, size: int) -> CacheFit:
    settings = EngineConfig(cache_type=cache_type.pair, key_conditioning=cache_type.key_conditioning)
    return fit_weights(PlacementRequest(settings, config, Sizes(size)), ops, [cache_type.pair]).caches[0]
