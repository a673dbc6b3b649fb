"""Files of encodings: how a model's keys and values become codes, as one machine has measured it.

A calibration and the scales that follow from it differ in their last bits from machine to machine, and codes mean
something else with other scales. Engines that load the same file store the same blocks: they share sessions and tiers.
The file is one object (`engine.storage.objects`). It has the statistics of all layers, and the scales of each layer for
codecs of keys with and without block means. A session or a pack is as good as a file: it has the scales that its codes
need, without statistics.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np

from polarlm.engine.backends.ops import Ops
from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.loading.calibration import Statistics
from polarlm.engine.loading.encoding import layer_scale
from polarlm.engine.model.fingerprint import fingerprint
from polarlm.engine.model.forward import ModelWeights
from polarlm.engine.model.kv_scales import variances
from polarlm.engine.quantization.conditioning import Scale
from polarlm.engine.quantization.statistics import LayerStatistics
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.storage import files, objects, sessions
from polarlm.engine.storage.identity import SIDES
from polarlm.engine.storage.objects import DamagedObject, Object
from polarlm.engine.storage.tiers.opening import KEY_VARIABLE
from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.files.repository import encoding_beside
from polarlm.model_loaders.forks import cached_property

_NAME = b"polarlm encoding"  # the name of the object
_VERSION = "1"  # the version of the meaning of the numbers
_URL, _SECONDS = re.compile("https?://"), 30.0  # timeout of a server that says nothing


@dataclass(frozen=True)
class ModelEncoding:
    """model: the fingerprint of the weights. name: of the model, for users. statistics: empty if the machine's own will
    do. scales: of each layer with K/V, by whether blocks of keys are stored without their mean."""

    model: str
    name: str
    block_size: int
    statistics: Statistics
    scales: Mapping[int, Mapping[bool, Scale]]

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by names such as "3 query_mean" and "3 plain keys", float32."""
        arrays: dict[str, np.ndarray] = {}
        for layer, scales in self.scales.items():
            if (one := self.statistics.get(layer)) is not None:
                arrays |= {f"{layer} {field.name}": getattr(one, field.name) for field in fields(one)}
            for is_centred, scale in scales.items():
                arrays |= {f"{layer} {SIDES[is_centred]} {name}": array for name, array in scale._asdict().items()}
        return arrays

    @cached_property
    def digest(self) -> str:
        """Of all numbers."""
        digest = hashlib.sha256(self.model.encode())
        for name, array in self.arrays.items():
            digest.update(repr((name, array.shape)).encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def encoding_of(
    ops: Ops, config: ModelConfig, weights: ModelWeights, name: str, block_size: int, statistics: Statistics
) -> ModelEncoding:
    """Return the encoding that these statistics lead to on this machine."""
    sizes = {
        is_centred: variances(ops, config, weights, [block_size if is_centred else None] * len(config.layers))
        for is_centred in SIDES
    }
    scales: dict[int, dict[bool, Scale]] = {}
    for layer, one in statistics.items():
        scales[layer] = {}
        for is_centred, of_layers in sizes.items():
            if (size := of_layers[layer]) is not None:
                scales[layer][is_centred] = layer_scale(size, one, is_centred)
    return ModelEncoding(fingerprint(ops, config, weights), name, block_size, statistics, scales)


def place_beside(weights: Path) -> Path:
    """Return where an engine looks for the encoding of these weights."""
    folder = weights if weights.is_dir() else weights.parent
    return folder / encoding_beside(weights, weights.is_dir())


def write(path: Path, encoding: ModelEncoding) -> None:
    """Raises EngineError ("storage")."""
    header = {
        "kind": "encoding",
        "version": _VERSION,
        "model": encoding.model,
        "name": encoding.name,
        "block_size": encoding.block_size,
    }
    try:
        files.write(path, objects.join_arrays(header, encoding.arrays).pack(_NAME))
        path.chmod(0o644)  # others load it, too
    except OSError as error:
        raise EngineError(
            f"The encoding cannot be written to {path} ({error.strerror or error}): choose another place", "storage"
        ) from None


def load(
    place: str | Path,
    ops: Ops,
    config: ModelConfig,
    weights: ModelWeights,
    block_size: int,
    centred: Mapping[int, bool],
    key: str | None = None,
) -> ModelEncoding:
    """Return the encoding at a path or a URL. centred: whether blocks of keys are stored without their mean, of each
    layer with K/V. key: see `_read`. Raises EngineError ("invalid_request") if it cannot be read, is
    damaged, or belongs to other weights, another block size, or, that of a session, other cache types."""
    try:
        stored = _read(place, key)
        if stored.header["kind"] == "encoding" and stored.header.get("version") != _VERSION:
            raise _error(f"The encoding {place} is from another version of this program: write it again")
        encoding = _parse(stored, config)
    except (OSError, HTTPException) as error:
        cause = getattr(error, "reason", None)  # of an error of urlopen
        reason = getattr(cause if isinstance(cause, OSError) else error, "strerror", None) or error
        raise EngineError(
            f"The encoding {place} cannot be read ({reason}): give the path or the URL of one",
            settings=("encoding",),
        ) from None
    except (DamagedObject, KeyError, TypeError, ValueError):
        raise _error(f"{place} is not an encoding, or a damaged one: write it again") from None
    if encoding.model != fingerprint(ops, config, weights):
        raise _error(
            f"The encoding {place} is of {encoding.name} with other weights than these, or the same ones in another "
            "precision: write one for these"
        )
    if encoding.block_size != block_size:
        raise EngineError(
            f"The encoding {place} is of blocks of {encoding.block_size} tokens, and here they have {block_size}: set "
            f"block_size to {encoding.block_size}, or write another one",
            settings=("encoding", "block_size"),
        )
    if not all(is_centred in encoding.scales[layer] for layer, is_centred in centred.items()):
        raise EngineError(
            f"{place} has the encoding of other cache types: give those as cache_type, or another encoding",
            settings=("encoding", "cache_type"),
        )
    return encoding


def _read(place: str | Path, key: str | None) -> Object:
    """key: the API key of the server at a URL; None for none. Raises OSError, HTTPException, ValueError or
    DamagedObject."""
    if isinstance(place, str) and _URL.match(place):
        question = Request(place, headers={} if key is None else {"Authorization": f"Bearer {key}"})
        with urlopen(question, timeout=_SECONDS) as answer:
            content = answer.read()
        is_of_session = objects.read_name(content[: objects.NAME_END]) == sessions.NAME
        return objects.unpack(sessions.NAME if is_of_session else _NAME, content, len(content))
    path = Path(place).expanduser()
    with path.open("rb") as file:
        return objects.read(file, sessions.NAME if sessions.is_session(path) else _NAME)


def _error(sentence: str) -> EngineError:
    return EngineError(f"{sentence} with polarlm fit --write", settings=("encoding",))


def _parse(stored: Object, config: ModelConfig) -> ModelEncoding:
    """Raises KeyError, TypeError or ValueError for an object that neither `write` nor `sessions.write` has written for
    such a model."""
    header, arrays = stored.header, objects.split_arrays(stored)
    is_whole = header["kind"] == "encoding"  # with statistics, and for all cache types
    size, statistics, scales = int(header["block_size"]), Statistics(), dict[int, dict[bool, Scale]]()

    def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if arrays[name].shape != shape:
            raise ValueError(f"{name} has another shape")
        return arrays[name]

    for layer, one in config.kv_attentions.items():
        heads, dim = one.kv_heads, one.head_dim
        if is_whole:
            shapes = {
                "token_correlation": (size,),
                "query_second": (heads, dim, dim),
                "output_second": (heads, dim, dim),
            }
            names = [field.name for field in fields(LayerStatistics)]
            statistics[layer] = LayerStatistics(
                **{name: array(f"{layer} {name}", shapes.get(name, (heads, dim))) for name in names}
            )
        scales[layer] = {
            is_centred: Scale(array(f"{layer} {side} keys", (heads, dim)), array(f"{layer} {side} values", (heads,)))
            for is_centred, side in SIDES.items()
            if is_whole or f"{layer} {side} keys" in arrays
        }
        if not all((divisors > 0).all() for scale in scales[layer].values() for divisors in scale):
            raise ValueError("a divisor that is not positive")
    return ModelEncoding(str(header["model"]), str(header["name"]), size, statistics, scales)


def find(
    engine_config: EngineConfig,
    source: Path,
    ops: Ops,
    config: ModelConfig,
    weights: ModelWeights,
    shape: CacheShape,
    say: Callable[[str], None],
) -> ModelEncoding | None:
    """Return the encoding that an engine is given, or that of its first pack, of the server that computes its prompts,
    or the one beside the weights; None if there is none, or if it does not fit, which `say` is called with. Raises
    EngineError for a given one that does not."""
    centred = {layer: one.mean_bits > 0 for layer, one in shape.kv_layers.items()}
    read = partial(load, ops=ops, config=config, weights=weights, block_size=engine_config.block_size, centred=centred)
    if engine_config.encoding is not None:
        return read(engine_config.encoding)
    packs = [Path(pack).expanduser() for pack in engine_config.packs.values()]
    server = [] if engine_config.prefill_at is None else [f"{engine_config.prefill_at.rstrip('/')}/encoding"]
    beside = place_beside(source)
    places: list[str | Path] = [*packs[:1], *server, *([beside] if beside.is_file() else [])]
    for place in places:
        try:
            encoding = read(place, key=os.environ.get(KEY_VARIABLE) or None if place in server else None)
        except EngineError as error:
            if place not in packs:  # opening the packs says what is wrong with one
                say(f"{error}. This engine fits its cache itself.")
        else:
            say(f"Keys and values are encoded as {place} says.")
            return encoding
    return None
