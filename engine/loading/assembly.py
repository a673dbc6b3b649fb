"""Assembles an engine: loads weights, plans and allocates the KV store, and warms up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polarlm import model_loaders
from polarlm.engine import codecs
from polarlm.engine.backends.ops import ExpertCache, Load, Ops
from polarlm.engine.backends.select import select, with_host, without_kernels
from polarlm.engine.cli.progress import BYTES, SHARE, above_bars, amounts, progress_bar
from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError, KernelError
from polarlm.engine.loading.encoding import WHOLE, Encoding
from polarlm.engine.loading.experts import ExpertPlan, asked_expert_plan
from polarlm.engine.loading.fitting import load_or_fit
from polarlm.engine.loading.gpu.cards import Split, split_model
from polarlm.engine.loading.gpu.cpu_experts import CpuExperts, asked_cpu_experts
from polarlm.engine.loading.rehearsal import rehearse, warm_up_first
from polarlm.engine.loading.sizes import (
    cache_shape,
    check_layers,
    draft_bytes,
    draft_config,
    fits_beside,
    give_back_freed_memory,
    is_calibrated,
    no_memory,
    store_plan,
    warn_of_context,
    weight_format,
    within_table,
)
from polarlm.engine.loading.tile_cache import MappedTiles, asked_tile_cache
from polarlm.engine.model.adapters import Adapters, delta_bytes, read_adapters
from polarlm.engine.model.encoder import Encoder
from polarlm.engine.model.forward import ModelWeights, Transformer
from polarlm.engine.model.weights import file_bytes, in_words, kept, left_out, load_weights, weight_bytes
from polarlm.engine.sampling.sample import NOT_FINITE
from polarlm.engine.state import cache_types
from polarlm.engine.state.plan import StorePlan, f16_tokens, format_bytes
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore
from polarlm.engine.storage.tiers.opening import open_tiers
from polarlm.engine.storage.tiers.tier_store import Folder, TierStore

if TYPE_CHECKING:
    from tqdm import tqdm

Say = Callable[[str], None]


@dataclass
class Parts:
    """The parts of an engine. source: the model as it was loaded from its files. model: its forward pass."""

    config: EngineConfig
    source: model_loaders.Model
    plan: StorePlan
    model: Transformer
    adapters: Adapters = field(default_factory=Adapters)
    tiers: Sequence[TierStore] = ()
    draft: Parts | None = None  # the parts of the draft model
    is_mapped: bool = False  # whether the weights are mapped from the tile cache
    experts: ExpertPlan | CpuExperts | None = None  # if not all are in the device's memory
    split: Split | None = None  # if several GPUs share the layers
    rehearsal: threading.Timer | None = None  # warms up for later turns and for several requests

    @property
    def draft_model(self) -> Transformer | None:
        return None if self.draft is None else self.draft.model

    @property
    def disk(self) -> Folder | None:
        """The tier on the disk; None if there is none."""
        folders = (tier for tier in self.tiers if isinstance(tier, Folder))
        return next((folder for folder in folders if folder.label == "disk"), None)

    def close(self) -> None:
        """Close the weights' files, and begin no rehearsal."""
        if self.rehearsal is not None:
            self.rehearsal.cancel()
        self.source.weights.close()
        if self.draft is not None:
            self.draft.close()


def assemble(config: EngineConfig, verbose: Say | None, encoding: Encoding = WHOLE, ops: Ops | None = None) -> Parts:
    """Load the model and allocate its KV store. Raises EngineError.

    ops: the backend; None selects that of `config.device`.
    """
    if verbose is not None:
        verbose = above_bars(verbose)
    say = verbose or (lambda sentence: None)
    try:
        if ops is not None:
            return _assemble(config, ops, verbose, encoding)
        ops, note = select(config.device, config.threads)
        if note:
            say(note)
        if config.cpu_moe is not None:
            ops, note = with_host(ops, config.threads)
            if note:
                say(note)
        try:
            return _assemble(config, ops, verbose, encoding)
        except KernelError as error:
            say(without_kernels(str(error)))
        return _assemble(config, select("cpu", config.threads, compiled=False)[0], verbose, encoding)
    except model_loaders.LoadError as error:
        raise EngineError(str(error), "model_unavailable") from error
    except MemoryError:
        raise no_memory("the model" if config.weights is None else Path(config.weights).name, None) from None


def _assemble(config: EngineConfig, ops: Ops, verbose: Say | None, encoding: Encoding) -> Parts:
    say = verbose or (lambda sentence: None)
    fits = fits_beside(config, encoding, ops)
    with ExitStack() as bars:
        loading = partial(_loading_bar, bars, verbose is not None)
        is_here = config.weights is not None and Path(config.weights).exists()
        bar = loading(Path(config.weights).name) if config.weights is not None and is_here else None
        source = model_loaders.load(config.weights, verbose=verbose, fits=fits)
        config = within_table(config, source.config, say)
        source = replace(source, config=source.config.for_context(config.ctx_size))
        if source.config.is_encoder and ops.of_encoders is None:
            source.weights.close()
            bars.close()
            kind = "a reranker" if source.config.scores_pairs else "an embedding model"
            say(f"{source.name} is {kind}, which runs on the CPU.")
            return _assemble(config, select("cpu", config.threads)[0], verbose, encoding)
        if bar is None:  # the files were fetched first, which shows its own
            bar = loading(source.name)
        if bar is not None:
            bar.total = file_bytes(source.weights)
            bar.set_description_str(f"Loading {source.name}", refresh=False)
        plan: StorePlan | None = None
        mapped: MappedTiles | None = None
        try:
            check_layers(ops, source.config, config.block_size)
            adapters = read_adapters(config, source.config, source.weights, say)
            added, of_draft_model = delta_bytes(ops, source.config, adapters.all), draft_bytes(config, ops)

            def draft(tokens: int) -> int:
                return added + of_draft_model(tokens)

            shape = cache_shape(config, encoding, ops, source.config)
            split = split_model(config, ops, source.config, source.weights, shape, adapters.all, say)
            ops = ops if split is None else split.ops
            tiers = open_tiers(config, shape, ops.name)
            weight_type = weight_format(config)
            size = weight_bytes(ops, source.weights, weight_type)
            progress = None if bar is None else bar.update
            load = partial(
                load_weights, ops, source.config, source.weights, weight_type=weight_type, adapters=adapters.all
            )
            if config.state_cache is not None and not any(layer.is_sparse for layer in shape.layers):
                say("state_cache has no effect on this model: it has no recurrent layers.")
            cache = asked_tile_cache(config, ops, source.weights, say)
            mapped = None if cache is None else cache.tiles(lambda kept: load(progress=progress, kept=kept))
            on_host = asked_cpu_experts(config, ops, source, shape, draft, say)
            if on_host is not None:
                size -= on_host.saved
                load = partial(load, on_host=on_host.layers)
            experts = None if mapped is not None else asked_expert_plan(config, ops, source, shape, draft, say)
            if experts is not None:
                size, room = size - experts.whole + experts.bytes, experts.room
            elif split is None:
                # The system can drop mapped weights, and reads them again: they leave half of the memory to others.
                room = ops.room_beside(size if mapped is None else min(size, ops.free_memory() // 2))
            if split is None:
                plan = store_plan(config, ops, source.config, shape, room, draft)
            else:
                plan = split.plan(config, source.config, shape, of_draft_model)
            warn_of_context(config, source.config, plan, say)
            if weight_type is not None and (warning := left_out(ops, source.weights, weight_type)):
                say(warning)
            warm = ops.warm_up()
            if warm is not None:
                later = warm_up_first(
                    config, encoding, warm, source, shape, on_host.layers if on_host else 0, adapters.all
                )
            held = None if experts is None else ExpertCache(experts.experts)
            if mapped is None:
                weights = load(progress=progress, cache=held)
            else:
                weights = replace(load(kept=mapped), why_damaged=mapped.removed_if_damaged)
            if lost := source.left_out():  # what is wrong with the tokenizer is an error of loading
                say(lost)
            bars.close()
            if not source.config.is_encoder:
                ops.set_aside(Load(source.config, shape.widest, plan.tokens, config.parallel))
            store = _store(config, encoding, ops, source, weights, plan, verbose)
            for clause in store.in_numpy():
                say(f"{clause}.")
            if warm is not None:
                what = f"Compiling kernels for this {'CPU' if ops.name == 'cpu' else 'GPU'} (once)"
                with progress_bar(verbose is not None, desc=what, bar_format=SHARE) as compiling:
                    warm.wait(amounts(compiling))
        except MemoryError:
            source.weights.close()
            raise no_memory(source.name, None if plan is None else (size, plan.bytes)) from None
        except (np.linalg.LinAlgError, EngineError) as error:  # squares of damaged weights, or of K/V, overflow
            source.weights.close()
            if isinstance(error, EngineError) and error.code != "model_damaged":
                raise
            if mapped is None or (reason := mapped.removed_if_damaged()) is None:
                raise EngineError(NOT_FINITE, "model_damaged") from None
            bars.close()
            say(f"{reason}: weights are packed again.")
            return _assemble(config, ops, verbose, encoding)
        except BaseException:
            source.weights.close()
            raise
    give_back_freed_memory()
    model = (Encoder if source.config.is_encoder else Transformer)(ops, source.config, weights, store)
    experts_kept = experts or on_host
    parts = Parts(config, source, plan, model, adapters, tiers, None, mapped is not None, experts_kept, split=split)
    parts.rehearsal = None if warm is None else rehearse(later)
    if config.model_draft is not None:
        try:
            of_draft = None if verbose is None else lambda sentence: say(f"draft model: {sentence}")
            own = ops if split is None else split.shares[-1].card
            parts.draft = _assemble(draft_config(config, plan.tokens), own, of_draft, encoding)
            _check_vocabulary(parts.source, parts.draft.source)
        except BaseException:
            parts.close()
            raise
    return parts


def _loading_bar(bars: ExitStack, is_shown: bool, name: str) -> tqdm[Any] | None:
    """Show a bar in bytes of the files of `name`, whose total is not known yet, until `bars` is closed."""
    return bars.enter_context(
        progress_bar(is_shown, desc=f"Loading {name}", bar_format=BYTES, unit="iB", unit_scale=True, unit_divisor=1024)
    )


def _check_vocabulary(model: model_loaders.Model, draft: model_loaders.Model) -> None:
    """Raises EngineError unless the ids of both models stand for the same texts."""
    ours, theirs = model.tokenizer, draft.tokenizer
    if model.vocabulary != draft.vocabulary or any(
        ours.token_bytes(token) != theirs.token_bytes(token) for token in model.vocabulary
    ):
        raise EngineError(
            f"model_draft={draft.path}: its vocabulary is not that of {model.name}; choose a smaller model of the same "
            "family",
            settings=("model_draft",),
        )


def with_cache(
    parts: Parts,
    config: EngineConfig,
    verbose: Say | None = None,
    planned: Callable[[CacheShape], StorePlan] | None = None,
    encoding: Encoding = WHOLE,
) -> Parts:
    """Return parts with the weights of `parts` and a KV store of their own for `config`, which has the same model,
    weight type and device. Closing either parts closes the files of both. Raises EngineError.

    planned: returns the plan of the store for its shape; None for that of `config`. encoding: the parts of the encoder
    that are on.
    """
    ops, source, weights = parts.model.ops, parts.source, parts.model.weights
    shape = cache_shape(config, encoding, ops, source.config)
    if planned is None and parts.split is not None:
        plan = parts.split.loaded().plan(config, source.config, shape)
    else:
        plan = planned(shape) if planned else store_plan(config, ops, source.config, shape, ops.room_beside(0))
    store = _store(config, encoding, ops, source, weights, plan, verbose)
    return Parts(config, source, plan, Transformer(ops, source.config, weights, store), split=parts.split)


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
    is_shown = verbose is not None and tokenizer is not None
    with progress_bar(is_shown, desc="Fitting the KV cache", bar_format=SHARE) as bar:
        found = load_or_fit(encoding, ops, source.config, weights, plan.shape, tokenizer, say, amounts(bar))
        return KVStore(ops, plan, *found)


def fit_line(parts: Parts) -> str:
    """Return a line for users: the model, how its weights are kept, the memory of weights and KV store, its context."""
    plan, shape, model, ops = parts.plan, parts.plan.shape, parts.source, parts.model.ops
    types = cache_types.in_words(parts.config)
    weights = in_words(kept(ops, model.weights, weight_format(parts.config)))
    where = ", mapped from the tile cache" if parts.is_mapped else ""
    if parts.experts is not None:
        where += f" ({parts.experts})"
    if model.config.is_encoder:
        what = f"embedding model: vectors of {model.config.vector_size}, texts of up to {plan.tokens:,} tokens"
        if model.config.scores_pairs:
            what = f"reranker: queries and documents of up to {plan.tokens:,} tokens together"
        return f"{model.name}: {weights}, {format_bytes(parts.model.weights.bytes)} on the {ops.name}{where}; {what}"
    snapshots = plan.snapshot_bytes if shape.has_host else 0
    beside = f" and {format_bytes(snapshots)} of snapshots in the computer's memory" if snapshots else ""
    line = (
        f"{model.name}: {weights}, {format_bytes(parts.model.weights.bytes)} on the {ops.name}{where}; "
        f"KV store {format_bytes(plan.bytes)}{beside}, "
        f"{shape.blocks_of_kv(plan.quantized_blocks)} blocks of {shape.block_size} as {types} "
        f"({shape.bits_per_value:.2f} bits/value): {plan.capacity:,} tokens fit"
    )
    return line if types == codecs.FULL else f"{line} (with an f16 cache: {f16_tokens(plan):,})"
