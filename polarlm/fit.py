"""`polarlm fit`: which types of weights and cache fit on this machine, and with which context, before loading them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polarlm import model_loaders
from polarlm.engine.cli.commands import columns, note, with_flags
from polarlm.engine.cli.flags import FlagError, check_that
from polarlm.engine.config import (
    AS_STORED,
    DEFAULT_CACHE_TYPE,
    EngineConfig,
    format_bytes,
    hub_setting,
    model_setting,
    setting,
)
from polarlm.engine.loading.checks import settle

if TYPE_CHECKING:
    from polarlm.engine.loading.fit import Advice, CacheFit, DeviceFit, WeightFit
    from polarlm.model_loaders import ModelConfig, hub


@dataclass(frozen=True)
class FitConfig:
    weights: str | None = model_setting()
    hf_repo: str | None = hub_setting("; its weights are not downloaded")
    contexts: str | None = setting(
        None,
        "-c",
        "--ctx-size",
        metavar="N[,N]",
        help="lengths of sequences to count, in tokens; without it, some steps up to the model's context",
    )
    weight_type: str = setting(
        AS_STORED, "--weight-type", metavar="TYPE", help="count sequences with weights converted to this type"
    )
    lora: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "flags": ("--lora",),
            "metavar": "[NAME=]PATH[:SCALE]",
            "help": "an adapter to load with the model; may be repeated",
        },
    )
    device: str = setting(
        "auto",
        "--device",
        metavar="DEVICE",
        help="the memory to look at: cpu, cuda, or GPUs by number, such as cuda:0,1; auto takes a GPU's, if it can be "
        "used, and the CPU's",
    )
    tensor_split: str | None = setting(
        None, "-ts", "--tensor-split", metavar="N,N,…", help="the GPUs' shares of the layers, such as 3,1, or auto"
    )
    json: bool = setting(False, "--json", help="print everything as JSON")


GROUPS: Mapping[str, type] = {"Fit": FitConfig}


def _is_list(text: str) -> bool:
    return all(word.strip().isdecimal() and 0 < int(word) < 2**31 for word in text.split(","))


@with_flags(
    GROUPS,
    "polarlm fit",
    "Show what fits on this machine, computed from a model's configuration before anything is loaded.",
    {"contexts": check_that(_is_list, "takes whole numbers above 0, separated by commas")},
)
def main(options: FitConfig) -> None:
    print(_report(options))


def _report(options: FitConfig) -> str:
    """The text to print. Raises FlagError, EngineError or LoadError."""
    from polarlm.engine.loading.fit import advise, context_steps, devices, fit_device
    from polarlm.engine.loading.placement.request import companion_bytes
    from polarlm.model_loaders import hub

    names = "weights", "hf_repo", "weight_type", "device", "lora", "tensor_split"
    settings = {name: getattr(options, name) for name in names}
    config = settle(None, None, settings)
    numbers = None if options.contexts is None else sorted({int(word) for word in options.contexts.split(",")})
    if numbers is not None and len(numbers) == 1:
        config = replace(config, ctx_size=numbers[0])
    path = config.weights
    on_hub = None if path is None else hub.hub_name(path)
    if on_hub is not None:
        if options.lora:
            raise FlagError("--lora: adapters are counted with a model that is here: give its path")
        model, dtype, fits = _fit_hub(on_hub, config, numbers)
    else:
        path = str(model_loaders.locate(path, verbose=note))
        model, source, dtype = model_loaders.load_weights(path, mtp=config.mtp, head=config.head)
        try:
            contexts = numbers or context_steps(model.max_context)
            fits = []
            for name, ops in devices(options.device):
                other_bytes = companion_bytes(config, ops, model, Path(path))
                fits.append(fit_device(config, name, ops, model, source, contexts=contexts, other_bytes=other_bytes))
        finally:
            source.close()
    advice = advise(fits, config, model)
    command = _command(advice, options, config.weights, "serve" if model.is_encoder else "chat")
    if options.json:
        about = {"model": path, "family": model.family, "max_context": model.max_context, "weights": dtype}
        result = {**about, "devices": [asdict(one) for one in fits], "advice": asdict(advice), "command": command}
        return json.dumps(result, indent=1, ensure_ascii=False)
    name = Path(str(path)).name if on_hub is None else str(on_hub)
    lines = [f"{name}: {model.depth} layers, {model.max_context:,} tokens of context, {dtype} weights"]
    for device in fits:
        lines += ["", *_device_lines(device, model)]
    lines += ["", advice.sentence]
    if command:
        lines.append(f"  {command}")
    return "\n".join(lines)


def _fit_hub(
    name: hub.HubName, config: EngineConfig, numbers: Sequence[int] | None
) -> tuple[ModelConfig, str, list[DeviceFit]]:
    """(configuration, format of the files, what fits) of a model on the hub, whose weights are not fetched."""
    from polarlm.engine.loading.fit import context_steps, devices, fit_files
    from polarlm.model_loaders import hub

    model, files = hub.sizes(name)
    contexts = numbers or context_steps(model.max_context)
    plain = str(replace(name, quantization=None))
    sizes = {f"{plain}:{label}" if label else "": size for label, size in files}
    fits = [fit_files(config, device, ops, model, sizes, contexts=contexts) for device, ops in devices(config.device)]
    return model, "GGUF" if files[0][0] else "safetensors", fits


def _device_lines(device: DeviceFit, model: ModelConfig) -> list[str]:
    """Two tables: cache types with the requested weights, and all types of weights."""
    from polarlm.engine.model.weights import describe_formats

    weights = device.weights[0]
    what = "The weights" if weights.weight_type == AS_STORED else f"The weights as {weights.weight_type}"
    if weights.kept:
        words = describe_formats(weights.kept)
        what = words[0].upper() + words[1:]
    room = f", {format_bytes(weights.lacking)} too much." if weights.lacking else ""
    room = room or f"; up to {format_bytes(weights.room)} is for the KV cache."
    if (experts := weights.experts or weights.cpu_experts) is not None:
        room = f" ({experts}){room}"
    lines = [
        f"{'CPU' if device.device == 'cpu' else device.name}: {format_bytes(device.free)} of memory free. {what} take "
        f"{format_bytes(weights.bytes)}{room}",
        "",
    ]
    usable = [cache for cache in weights.caches if not cache.problem]
    if not usable:
        return [*lines, *(cache.problem for cache in weights.caches)]
    contexts = [one.tokens for one in usable[0].contexts]
    header = ["cache type", "bits/value", "KV per token", "longest context", *(f"× {tokens:,}" for tokens in contexts)]
    rows = [
        [
            cache.cache_type,
            f"{cache.bits_per_value:.2f}",
            format_bytes(cache.bytes_per_token),
            f"{cache.tokens:,}",
            *(
                f"{one.sequences:,}" if one.sequences else f"lacks {format_bytes(one.lacking)}"
                for one in cache.contexts
            ),
        ]
        for cache in usable
    ]
    lines += [
        *columns([header, *rows]),
        f"bits/value, KV per token: of the whole context; × {contexts[0]:,}: how many sequences of {contexts[0]:,} "
        "tokens fit at a time",
    ]
    if device.device != "cpu" and (snapshots := max(cache.snapshot_bytes for cache in usable)):
        lines.append(f"Snapshots of recurrent layers take {format_bytes(snapshots)} of the computer's memory.")
    lines += [cache.problem for cache in weights.caches if cache.problem]
    lines += _share_lines(next((one for one in usable if one.cache_type == DEFAULT_CACHE_TYPE), usable[0]))
    if max(contexts) > model.max_context:
        lines.append(f"The model was trained on {model.max_context:,} tokens; answers beyond may make no sense.")
    return [*lines, "", *_weight_lines(device, [cache.cache_type for cache in usable])]


def _share_lines(cache: CacheFit) -> list[str]:
    """A table of the GPUs that share the layers, and what each has, with one cache type."""
    if not cache.cards:
        return []
    least = min(device.left for device in cache.cards)
    rows = [
        [
            device.name,
            " to ".join(dict.fromkeys(map(str, device.layers))),
            *map(format_bytes, (device.weights, device.store, device.work, device.left)),
            "the fullest" if device.left == least else "",
        ]
        for device in cache.cards
    ]
    header = ["GPU", "layers", "weights", f"KV cache ({cache.cache_type})", "work", "left", ""]
    return ["", "The GPUs share the layers:", *columns([header, *rows])]


def _weight_lines(device: DeviceFit, types: Sequence[str]) -> list[str]:
    """A table of all types of weights: their memory, and the longest contexts with them where these differ."""
    same = len({one.cache(name).tokens for one in device.weights for name in types}) == 1
    types_shown = () if same else types
    rows = [
        [
            _label(one),
            format_bytes(one.bytes),
            *(
                f"lacks {format_bytes(one.lacking)}" if one.lacking else f"{one.cache(name).tokens:,}"
                for name in types_shown
            ),
        ]
        for one in device.weights
    ]
    if same:
        tokens = device.weights[0].cache(types[0]).tokens
        return [f"With any of these weights, {tokens:,} tokens fit:", *columns([["weights", "memory"], *rows])]
    title = "The longest context for each type of weights and of cache:"
    return [title, *columns([["weights", "memory", *types_shown], *rows])]


def _label(weights: WeightFit) -> str:
    """The type of weights; for "as-stored", also which of them are converted after all."""
    conversions = [str(one) for one in weights.kept if one.how != "as stored"]
    return (
        f"{AS_STORED}: {', '.join(conversions)}"
        if conversions and weights.weight_type == AS_STORED
        else weights.weight_type
    )


def _command(advice: Advice, options: Any, model: str | None, program: str) -> str | None:
    """The command that starts `program` with the advised settings; None if the model does not fit."""
    from polarlm.model_loaders.hub import hub_name

    if advice.settings is None:
        return None
    flags = {name: str(value) for name, value in advice.settings.items()}
    if options.device != "auto":
        flags["device"] = options.device
    if options.tensor_split is not None:
        flags["tensor_split"] = options.tensor_split
    if hub_name(flags.get("weight_type", "")):  # one of the files of a repository
        model = flags.pop("weight_type")
    words = [] if model is None else [model]
    for name, adapter in options.lora.items():
        words += ["--lora", f"{name}={adapter}"]
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}", value]
    # What a shell of this system reads: Windows' own does not know single quotes.
    join = subprocess.list2cmdline if sys.platform == "win32" else shlex.join
    return join(["polarlm", program, *words])


if __name__ == "__main__":
    sys.exit(main())
