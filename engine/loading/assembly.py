"""Assembles an engine: loads weights, plans and allocates the KV store, and warms up."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polarlm import model_loaders
from polarlm.engine.backends.ops import ExpertCache, Load, Ops
from polarlm.engine.backends.select import select, with_host, without_kernels
from polarlm.engine.cli.progress import BYTES, SHARE, above_bars, amounts, progress_bar
from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError, KernelError
from polarlm.engine.limits import EAGLE3
from polarlm.engine.loading import checks
from polarlm.engine.loading.encoding import FULL_ENCODING, Encoding
from polarlm.engine.loading.fitting import load_or_fit
from polarlm.engine.loading.parts import Parts, fit_line, start_line
from polarlm.engine.loading.placement.place import Placement, place
from polarlm.engine.loading.placement.request import companion_bytes, draft_config, fit_check, request_from_source
from polarlm.engine.loading.sizes import (
    check_layers,
    give_back_freed_memory,
    is_calibrated,
    limit_context,
    no_memory,
    warn_of_context,
    weight_format,
)
from polarlm.engine.loading.warm_up import warm_up_first, warm_up_later
from polarlm.engine.model.adapters import Adapters, read_adapters
from polarlm.engine.model.encoder import Encoder
from polarlm.engine.model.fingerprint import fingerprint
from polarlm.engine.model.forward import ModelWeights, Transformer
from polarlm.engine.model.weights import file_bytes, left_out, load_vision_encoder, load_weights
from polarlm.engine.sampling.sample import NOT_FINITE
from polarlm.engine.state.plan import StorePlan
from polarlm.engine.state.store import KVStore
from polarlm.engine.storage.packs import local_packs, read_scales
from polarlm.engine.storage.tiers.opening import open_tiers
from polarlm.model_loaders.errors import close_on_error

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["Parts", "assemble", "fit_line", "replace_cache", "start_line"]

Say = Callable[[str], None]


def assemble(config: EngineConfig, verbose: Say | None, ops: Ops | None = None) -> Parts:
    """Load the model and allocate its KV store. ops: None for the backend of `config.device`. Raises EngineError."""
    if verbose is not None:
        verbose = above_bars(verbose)
    try:
        if ops is not None:
            return _assemble(config, ops, verbose)
        try:
            return _assemble(config, _device(config, verbose or _say_warning), verbose)
        except KernelError as error:
            (verbose or _say_warning)(without_kernels(str(error)))
        return _assemble(config, select("cpu", config.threads, compiled=False)[0], verbose)
    except model_loaders.LoadError as error:
        raise EngineError(str(error), "model_unavailable") from error
    except MemoryError:
        raise no_memory("the model" if config.weights is None else Path(config.weights).name, None) from None


def _say_warning(sentence: str) -> None:
    """Tell a caller who wants no sentences of warnings alone, as Python does."""
    if (text := sentence.removeprefix("warning: ")) != sentence:
        warnings.warn(text, stacklevel=2)


def _device(config: EngineConfig, say: Say) -> Ops:
    ops, note = select(config.device, config.threads)
    if note:
        say(note)
    if config.cpu_moe is not None:
        ops, note = with_host(ops, config.threads)
        if note:
            say(note)
    return ops


def _assemble(config: EngineConfig, ops: Ops, verbose: Say | None) -> Parts:
    parts = _Loader(config, ops, verbose).run()
    if config.small_model is not None:
        with close_on_error(parts):
            parts.draft = _draft(parts, verbose)
    return parts


def _draft(parts: Parts, verbose: Say | None) -> Parts:
    """Load the draft model; of several GPUs on the last one. Raises EngineError if its vocabulary is another one."""
    say = None if verbose is None else lambda sentence: verbose(f"draft model: {sentence}")
    ops = parts.model.ops if (split := parts.placement.split) is None else split.shares[-1].device
    draft, model = _assemble(draft_config(parts.config, parts.plan.tokens), ops, say), parts.source
    ours, theirs = model.tokenizer, draft.source.tokenizer
    if model.vocabulary == draft.source.vocabulary and all(
        ours.token_bytes(token) == theirs.token_bytes(token) for token in model.vocabulary
    ):
        return draft
    draft.close()
    raise EngineError(
        f"model_draft={draft.source.path}: its vocabulary is not that of {model.name}; choose a smaller model of the "
        "same family",
        settings=("model_draft",),
    )


class _Loader:
    """A model on its way from files to the parts of an engine."""

    def __init__(self, config: EngineConfig, ops: Ops, verbose: Say | None) -> None:
        self._config, self._ops, self._verbose = config, ops, verbose
        self._say = verbose or _say_warning
        self._weight_format = weight_format(config)
        self._adapters = Adapters()
        self._placement: Placement | None = None
        self._bar: tqdm[Any] | None = None

    def run(self) -> Parts:
        """Return the parts, without a draft model. Raises EngineError, LoadError, KernelError or MemoryError."""
        with ExitStack() as bars:
            self._source = self._open(bars)
            try:
                parts = self._parts(bars)
            except BaseException as error:
                self._source.close()
                if (user_error := self._as_engine_error(error)) is not error:
                    raise user_error from None
                raise
        give_back_freed_memory()
        return parts

    def _open(self, bars: ExitStack) -> model_loaders.Model:
        """Open the model's files, and fetch them first if need be. Encoders go to the CPU."""
        config, say = self._config, self._say
        is_here = config.weights is not None and Path(config.weights).exists()
        if config.weights is not None and is_here:
            self._bar = _loading_bar(bars, self._verbose is not None, Path(config.weights).name)
        fits, template = fit_check(config, self._ops), config.chat_template_file
        source = model_loaders.load(
            config.weights,
            verbose=self._verbose,
            fits=fits,
            template=template,
            mmproj=config.mmproj,
            mtp=config.mtp,
            head=config.head,
        )
        self._config = replace(limit_context(config, source.config, say), packs=local_packs(config, say))
        source = replace(source, config=source.config.for_context(self._config.ctx_size))
        if source.config.is_encoder and self._ops.backend == "cuda":
            kind = "a reranker" if source.config.scores_pairs else "an embedding model"
            say(f"{source.name} is {kind}, which runs on the CPU.")
            self._ops, _ = select("cpu", config.threads)
        if self._bar is None:  # the files were fetched first, which shows bars of its own
            self._bar = _loading_bar(bars, self._verbose is not None, source.name)
        if self._bar is not None:
            files = [source.weights, *([source.vision_weights] if source.vision_weights else [])]
            self._bar.total = sum(map(file_bytes, files))
            self._bar.set_description_str(f"Loading {source.name}", refresh=False)
        return source

    def _parts(self, bars: ExitStack) -> Parts:
        config, source = self._config, self._source
        check_layers(self._ops, source.config, config.block_size)
        self._adapters = read_adapters(config, source.config, source.weights, self._say)
        placement = self._placement = self._place()
        ops, plan = placement.ops, placement.store_plan
        if source.config.eagle3 is not None and placement.split is not None:
            sentence = f"spec_type={EAGLE3}: a head reads layers of one GPU; leave out tensor_split, or name one device"
            raise EngineError(sentence, settings=("spec_type", "tensor_split"))
        self._warn(placement)
        if why := ops.set_input_bits(str(config.input_bits)):
            self._say(f"input_bits has no effect here: {why}.")
        tiers = open_tiers(config, plan.shape, ops.name)
        warm = ops.warm_up()
        host_layers = placement.on_host.layers if placement.on_host else 0
        later: list[Callable[[], None]] = []
        if warm is not None:
            later = warm_up_first(config, warm, source, placement.shape, host_layers, self._adapters.all)
        weights = self._weights(placement, host_layers)
        if warning := source.left_out():  # what is wrong with the tokenizer is an error of loading
            self._say(warning)
        bars.close()
        if not source.config.is_encoder:
            ops.reserve_workspace(Load(source.config, plan.shape.widest, plan.tokens, config.parallel))
        store = _store(config, FULL_ENCODING, ops, source, weights, plan, self._verbose)
        if config.replayable:
            checks.check_replayable(ops, store, config.parallel)
        for clause in store.numpy_fallbacks():
            self._say(f"{clause}.")
        if warm is not None:
            what = f"Compiling kernels for this {'CPU' if ops.name == 'cpu' else 'GPU'} (once)"
            with progress_bar(self._verbose is not None, desc=what, bar_format=SHARE) as bar:
                warm.wait(amounts(bar))
        model = (Encoder if source.config.is_encoder else Transformer)(ops, source.config, weights, store)
        timer = None if warm is None else warm_up_later(later, partial(warm.wait, lambda done, count: None))
        return Parts(config, source, placement, model, self._adapters, tiers, None, timer)

    def _place(self) -> Placement:
        config, source = self._config, self._source
        request = request_from_source(config, self._ops, source.config, source.weights, self._adapters.all)
        other_bytes = companion_bytes(config, self._ops, source.config, source.path)
        return place(replace(request, other_bytes=other_bytes), self._ops, self._say)

    def _warn(self, placement: Placement) -> None:
        config, source = self._config, self._source
        if config.state_cache is not None and not any(layer.is_sparse for layer in placement.shape.layers):
            self._say("state_cache has no effect on this model: it has no recurrent layers.")
        warn_of_context(config, source.config, placement.store_plan, self._say)
        if self._weight_format and (warning := left_out(placement.ops, source.weights, self._weight_format)):
            self._say(warning)

    def _weights(self, placement: Placement, host_layers: int) -> ModelWeights:
        ops, source = placement.ops, self._source
        progress = None if self._bar is None else self._bar.update
        weights = load_weights(
            ops,
            source.config,
            source.weights,
            progress,
            self._weight_format,
            cache=None if placement.experts is None else ExpertCache(placement.experts.experts),
            on_host=host_layers,
            adapters=self._adapters.all,
        )
        if source.vision_encoder is None or source.vision_weights is None:
            return weights
        reader = load_vision_encoder(ops, source.vision_encoder, source.vision_weights, progress)
        return replace(weights, images=reader, bytes=weights.bytes + reader.bytes)

    def _as_engine_error(self, error: BaseException) -> BaseException:
        """Return the error that users get for one of loading."""
        if isinstance(error, MemoryError):
            placement = self._placement
            sizes = None
            if placement is not None and placement.plan is not None:
                sizes = placement.weights, placement.plan.bytes
            return no_memory(self._source.name, sizes)
        is_damaged = isinstance(error, EngineError) and error.code == "model_damaged"
        if not is_damaged and not isinstance(error, np.linalg.LinAlgError):  # squares of damaged weights, or of K/V
            return error
        return EngineError(NOT_FINITE, "model_damaged")


def _loading_bar(bars: ExitStack, is_shown: bool, name: str) -> tqdm[Any] | None:
    """Show a bar in bytes of the files of `name`, whose total is not known yet, until `bars` is closed."""
    return bars.enter_context(
        progress_bar(is_shown, desc=f"Loading {name}", bar_format=BYTES, unit="iB", unit_scale=True, unit_divisor=1024)
    )


def replace_cache(
    parts: Parts,
    config: EngineConfig,
    verbose: Say | None = None,
    encoding: Encoding = FULL_ENCODING,
) -> Parts:
    """Return parts with the weights of `parts` and a KV store of their own for `config`, which has the same model,
    weight type and device; see `Placement.after_loading`. Closing either closes the files of both. Raises
    EngineError."""
    ops, source, weights = parts.model.ops, parts.source, parts.model.weights
    ops.forget()  # or else the memory of stores that are not used any more
    placement = parts.placement.after_loading(config, encoding)
    store = _store(config, encoding, ops, source, weights, placement.store_plan, verbose)
    return Parts(config, source, placement, Transformer(ops, source.config, weights, store))


@np.errstate(invalid="ignore", over="ignore")  # damaged weights are an error of the requests that read them
def _store(
    config: EngineConfig,
    encoding: Encoding,
    ops: Ops,
    source: model_loaders.Model,
    weights: ModelWeights,
    plan: StorePlan,
    verbose: Say | None,
) -> KVStore:
    """Return the KV store, fitted to the model."""
    if source.config.is_encoder:
        return KVStore(ops, plan, [])
    tokenizer = source.tokenizer if is_calibrated(config, plan.shape) else None
    say = verbose or (lambda sentence: None)
    scales = None
    if encoding == FULL_ENCODING and config.calibration and config.key_conditioning:
        scales = read_scales(config, fingerprint(ops, source.config, weights), plan.shape)
    if scales is not None:
        say(f"Keys and values have the scales of {next(iter(config.packs.values()))}.")
    is_shown = verbose is not None and tokenizer is not None
    with progress_bar(is_shown, desc="Fitting the KV cache", bar_format=SHARE) as bar:
        encodings = load_or_fit(encoding, ops, source.config, weights, plan.shape, tokenizer, scales, say, amounts(bar))
        return KVStore(ops, plan, *encodings, keeps_recent=config.replayable)
