"""Models with a layer that predicts several tokens, for tests: small ones of random weights."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from polarlm import Engine
from polarlm.engine.requests.drafters.mtp import MtpDrafter
from polarlm.model_loaders.families import tensors
from polarlm.model_loaders.files.folder import open_folder
from tests.requests.drafters import Known, Unpaced
from tests.tiny import VOCABULARY, make_model


def make_mtp(folder: Path, fixture: str) -> Path:
    """Fill `folder` as `make_model` does, with a layer more: a copy of the last attention, by its names in files."""
    path = make_model(folder, fixture)
    config, weights = open_folder(path)
    weights.close()
    file, depth = path / "model.safetensors", config.depth
    content = file.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    header, parts = json.loads(content[8:data]), [content[data:]]

    last = int(tensors(config).layers[max(config.attentions)]["attention_norm"][0].name.split(".")[2])
    is_mtp = config.family.startswith(("qwen", "nemotron"))
    of_layers = {last: "mtp.layers.0." if is_mtp else f"model.layers.{depth}."}
    if config.family.startswith("nemotron"):
        of_layers[last + 1] = "mtp.layers.1."
    own = "mtp." if config.family.startswith("qwen") else f"model.layers.{depth}."

    def add(name: str, dtype: str, shape: Sequence[int], raw: bytes) -> None:
        end = sum(map(len, parts))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(raw)]}
        parts.append(raw)

    for name, one in [*header.items()]:
        number = re.search(r"\.layers\.(\d+)\.", name)
        if number is not None and int(number[1]) in of_layers:
            start, end = one["data_offsets"]
            new = of_layers[int(number[1])] + name[number.end() :]
            add(new, one["dtype"], one["shape"], content[data + start : data + end])
    rng = np.random.default_rng(0)
    for slot, (spec, *_) in tensors(config.with_mtp()).layers[-1].items():
        if slot.startswith("mtp_"):
            value = rng.normal(0, 0.3, spec.shape) + (1 - spec.offset) * (len(spec.shape) == 1)
            name = spec.name.replace(f"model.layers.{depth}.", own)
            add(name, "F32", spec.shape, value.astype("<f4").tobytes())
    written = json.dumps(header).encode()
    file.write_bytes(len(written).to_bytes(8, "little") + written + b"".join(parts))
    return path


class Beside:
    """Lets a model's layer draft, and drafts what is known instead, so that tokens are accepted."""

    def __init__(self, engine: Engine, known: Known) -> None:
        self._engine, self._known, self.drafted = engine, known, 0

    def draft(self, ids: Sequence[int], most: int) -> Sequence[int]:
        if most < 1:
            return ()
        of_this = (one for one in self._engine._runner.requests.values() if isinstance(one.drafts, Unpaced))
        kv = next(one.kv for one in of_this if one.drafts._given is self)
        self.drafted += len(MtpDrafter(self._engine._model.mtp, VOCABULARY, lambda: kv).draft(ids, most))
        return self._known.draft(ids, most)

    def is_ready(self, ids: Sequence[int]) -> bool:
        return True

    def release(self) -> None:
        pass
