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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import BinaryIO

import numpy as np

from polarlm.engine.backends.ops import Ops
from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.loading.calibration import Statistics, read_statistics, statistics_arrays
from polarlm.engine.model.fingerprint import fingerprint
from polarlm.engine.model.forward import ModelWeights
from polarlm.engine.quantization.conditioning import Scale
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.storage import files, identity, objects, sessions
from polarlm.engine.storage.objects import DamagedObject, Object
from polarlm.engine.storage.tiers.opening import KEY_VARIABLE
from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.files.repository import encoding_beside
from polarlm.model_loaders.forks import cached_property

_NAME = b"polarlm encoding"  # the name of the object
_VERSION = "1"  # the version of the meaning of the numbers
_URL, _SECONDS = re.compile("https?://"), 30.0  # timeout of a server that says nothing
_MOST_BYTES = 1 << 30  # of an encoding: six times those of the largest models
_WRITE = "write it again with polarlm fit --write"

Scales = Mapping[tuple[int, bool], Scale]  # by layer, and whether blocks of keys are stored without their mean


@dataclass(frozen=True)
class ModelEncoding:
    """model: the fingerprint of the weights. name: of the model, for users. statistics: empty if the machine's own will
    do."""

    model: str
    name: str
    block_size: int
    statistics: Statistics
    scales: Scales

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by names such as "3 query_mean" and "3 plain keys", float32."""
        arrays = statistics_arrays(self.statistics)
        for (layer, is_centred), scale in self.scales.items():
            arrays |= identity.name_scale(layer, is_centred, scale)
        return arrays

    @cached_property
    def digest(self) -> str:
        """Of all numbers, whose checksum is before the payload."""
        return hashlib.sha256(self.pack()[0]).hexdigest()

    def pack(self) -> tuple[bytes, memoryview]:
        """Return the parts of its file."""
        header = {"kind": "encoding", "version": _VERSION, "model": self.model, "name": self.name}
        return objects.join_arrays({**header, "block_size": self.block_size}, self.arrays).pack(_NAME)


def place_beside(weights: Path) -> Path:
    """Return where an engine looks for the encoding of these weights."""
    folder = weights if weights.is_dir() else weights.parent
    return folder / encoding_beside(weights, weights.is_dir())


def write(path: Path, encoding: ModelEncoding) -> None:
    """Raises EngineError ("storage")."""
    try:
        files.write(path, encoding.pack())
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
        model, name, size = (str(stored.header[field]) for field in ("model", "name", "block_size"))
        if stored.header["kind"] == "encoding" and stored.header.get("version") != _VERSION:
            raise _error(f"The encoding {place} is from another version of this program: {_WRITE}")
        if model != fingerprint(ops, config, weights):
            raise _error(
                f"The encoding {place} is of {name} with other weights than these, or the same ones in another "
                "precision: write one for these with polarlm fit --write"
            )
        if size != str(block_size):
            raise _error(
                f"The encoding {place} is of blocks of {size} tokens, and here they have {block_size}: set block_size "
                f"to {size}, or write another one",
                "block_size",
            )
        encoding = ModelEncoding(model, name, block_size, *_parse(stored, config, block_size))
    except OSError as error:
        cause = getattr(error, "reason", None)  # of an error of urlopen
        reason = getattr(cause if isinstance(cause, OSError) else error, "strerror", None) or error
        raise _error(f"The encoding {place} cannot be read ({reason}): give the path or the URL of one") from None
    except (DamagedObject, KeyError, TypeError, ValueError):
        raise _error(f"{place} is not an encoding, or a damaged one: {_WRITE}") from None
    if not centred.items() <= encoding.scales.keys():
        raise _error(
            f"{place} has the encoding of other cache types: give those as cache_type, or another encoding",
            "cache_type",
        )
    return encoding


def _read(place: str | Path, key: str | None) -> Object:
    """Return the first object of a file or of what a server sends, of an encoding or a session. key: the API key of the
    server at a URL; None for none. Raises OSError, ValueError or DamagedObject."""
    is_url = isinstance(place, str) and _URL.match(place)
    with _open_url(str(place), key) if is_url else Path(place).expanduser().open("rb") as source:
        name, content = objects.read_packed(source.read, _MOST_BYTES) or (b"", b"")
    if name not in (_NAME, sessions.NAME):
        raise DamagedObject("it is another object, or none")
    return objects.unpack(name, content, len(content))


@contextmanager
def _open_url(url: str, key: str | None) -> Iterator[BinaryIO]:
    """Raises OSError, also while it is read."""
    from http.client import HTTPException  # imported where they are used: they take time
    from urllib.request import Request, urlopen

    try:
        with urlopen(
            Request(url, headers={"Authorization": f"Bearer {key}"} if key else {}), timeout=_SECONDS
        ) as answer:
            yield answer
    except HTTPException as error:
        raise ConnectionError(str(error) or type(error).__name__) from None


def _error(sentence: str, *settings: str) -> EngineError:
    return EngineError(sentence, settings=("encoding", *settings))


def _parse(stored: Object, config: ModelConfig, block_size: int) -> tuple[Statistics, Scales]:
    """Raises KeyError, TypeError or ValueError for an object that neither `write` nor `sessions.write` has written for
    such a model."""
    arrays, scales = objects.split_arrays(stored), dict[tuple[int, bool], Scale]()
    is_whole = stored.header["kind"] == "encoding"  # with statistics, and for all cache types
    for (layer, one), (is_centred, side) in product(config.kv_attentions.items(), identity.SIDES.items()):
        if is_whole or f"{layer} {side} keys" in arrays:
            keys, values = (arrays[f"{layer} {side} {field}"] for field in Scale._fields)
            if keys.shape != (one.kv_heads, one.head_dim) or values.shape != (one.kv_heads,):
                raise ValueError("divisors have another shape")
            if not ((keys > 0).all() and (values > 0).all()):
                raise ValueError("a divisor is not positive")
            scales[layer, is_centred] = Scale(keys, values)
    return read_statistics(arrays, config, block_size) if is_whole else Statistics(), scales


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
