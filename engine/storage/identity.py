"""What determines the codes of a KV store: the settings that a session and the engine that loads it must share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from polarlm.engine.model.fingerprint import fingerprint
from polarlm.engine.model.forward import Transformer
from polarlm.engine.quantization.conditioning import Scale
from polarlm.engine.state.cache_types import setting_by_layer
from polarlm.engine.state.store import KVStore

# What determines codes, in the order in which it is checked → what to say if it differs.
_DIFFERENCES = {
    "model": "was saved with the model {there}, and this is {here}, or the same one with weights in another precision, "
    "or with or without spec_type=mtp, eagle3 or assistant: load it where it was saved",
    "block_size": "was saved with blocks of {there} tokens, and this engine's have {here}: set block_size to {there}",
    "cache_types": "was saved with the cache types {there} (keys/values), and this engine has {here}: "
    "choose them with cache_type, or with cache_type_k and cache_type_v",
    "conditioning": "has keys and values that are encoded in another way, as the machine that saved it has calibrated "
    "them: load it there, or save it anew with calibration=False on both machines, or make a pack by polarlm pack "
    "--like with the first pack of this engine; if that does not help, key_conditioning was another one, or the "
    "version of this program",
}
DETERMINE = tuple(_DIFFERENCES)
_UNNAMED_STATE = "8bit"  # the default, which a session does not name
BY_AGE = " by-age:linear8"  # of cache types in earlier versions, whose recent blocks were linear8


def settings(model: Transformer, name: str, *, replayable: bool = False) -> dict[str, str]:
    """Return the model's name, and all that determines codes except token ids, as text for the header of a session."""
    shape, arrays = model.store.shape, scale_arrays(model.store)
    bits = " ".join(str(layer.mean_bits) for layer in shape.kv_layers.values())
    digest = hashlib.sha256(json.dumps({"mean_bits": bits}).encode())
    for key, array in arrays.items():
        layer, _, side = key.split()
        digest.update(repr((f"{layer}.{side}", array.shape, str(array.dtype))).encode())
        digest.update(np.ascontiguousarray(array).data)
    return {
        "name": name,
        "model": fingerprint(model.ops, model.config, model.weights),
        "block_size": str(shape.block_size),
        "cache_types": " ".join("/".join(one.name for one in layer.codecs) for layer in shape.kv_layers.values())
        + "".join(f" state:{name}" for name in _state_types(shape.layers) if name != _UNNAMED_STATE)
        + (" replayable" if replayable else ""),
        "conditioning": digest.hexdigest(),
    }


def scale_arrays(store: KVStore) -> dict[str, np.ndarray]:
    """Return the divisors of keys and values that codes depend on, by the names of `name_scale`."""
    arrays: dict[str, np.ndarray] = {}
    for layer, one in store.shape.kv_layers.items():
        if (scale := store.conditioning[layer].scale) is not None:
            arrays |= zip(name_scale(layer, one.mean_bits > 0), scale, strict=True)
    return arrays


def name_scale(layer: int, is_centred: bool) -> list[str]:
    """Return the names of the divisors of a layer, such as "3 centred keys". is_centred: whether blocks of keys are
    stored without their mean."""
    return [f"{layer} {'centred' if is_centred else 'plain'} {side}" for side in Scale._fields]


def hash_root(settings: Mapping[str, str], others: Mapping[str, str]) -> bytes:
    """Return what stands for these settings in the hashes of blocks, with what a session need not share."""
    return json.dumps({key: value for key, value in settings.items() if key != "name"} | dict(others)).encode()


def _state_types(layers: Sequence[Any]) -> Iterable[str]:
    return dict.fromkeys(layer.codes.name for layer in layers if hasattr(layer, "codes"))


def difference(there: Mapping[str, Any], here: Mapping[str, str]) -> str | None:
    """Return what to say of the first setting in which a session differs from an engine; None if none."""
    there = {**there, "cache_types": str(there.get("cache_types")).replace(BY_AGE, "")}
    key = next((key for key in DETERMINE if there.get(key) != here[key]), None)
    if key is None:
        return None
    shown = "name" if key == "model" else key
    old, new = (", ".join(dict.fromkeys(str(side.get(shown)).split(" "))) for side in (there, here))
    if key == "cache_types" and set(str(there.get(key)).split(" ")) == set(here[key].split(" ")):  # in other layers
        old, new = _types_by_layer(there[key]), _types_by_layer(here[key])
    return _DIFFERENCES[key].format(there=old, here=new)


def _types_by_layer(types: str) -> str:
    """Return the types of keys and of values, each by the number among layers with K/V."""
    pairs = [pair.split("/") for pair in types.split(" ") if "/" in pair]
    return f"{setting_by_layer([k for k, _ in pairs])}/{setting_by_layer([v for _, v in pairs])}"
