"""Vision encoders: the part of a model that reads images. A file `vision_encoders/NAME.py` is one kind; files of models
name it.

A module defines

- `MODEL_TYPES`: the `model_type` of configurations whose `vision_config` it reads, and the families of their decoders;
- `configure(fields, prepared) -> VisionEncoder`: from config.json, and preprocessor_config.json (empty if missing);
- `fit(encoder, width, height) -> ImageShape`: what an image of so many pixels becomes;
- `tensors(encoder) -> TensorTable`: its tensors; the names in a folder's files, and llama.cpp's in an mmproj file;
- optionally `PREFIXES`: prefixes of tensor names in some folders → the table's prefixes;
- optionally `PROJECTORS`: values of `clip.projector_type` in mmproj files → `read(fields, shapes) -> VisionEncoder`.
  The fields are the file's metadata, without "clip.vision."; the shapes are of its tensors, by their names;
- optionally `TEXT_FAMILIES`: families, and sizes of their vocabularies, of decoders in files of llama.cpp's;
- optionally `HAS_SECTIONS`: whether RoPE of its decoders has sections, which tells them from others of their families;
- optionally `INTERLEAVED`: whether RoPE's pairs are neighbouring channels in files of llama.cpp's;
- optionally `take_apart(encoder, stored)`: the table's tensors, found in the tensors of files, by the table's names.

Modules that begin with an underscore are helpers. What a vision encoder computes is in
`engine/model/vision_encoders/NAME.py`.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.errors import LoadError, close_on_error
from polarlm.model_loaders.fields import Fields, describe
from polarlm.model_loaders.files.gguf_file import GgufFile
from polarlm.model_loaders.files.repository import companion_in
from polarlm.model_loaders.files.safetensors_source import open_safetensors
from polarlm.model_loaders.files.tensor_table import TensorTable
from polarlm.model_loaders.files.tensors import StoredTensor, StoredWeights
from polarlm.model_loaders.files.weights import arrange, complete
from polarlm.model_loaders.weight_quantization import read_quantized

_SAMPLE = 1024  # bytes of a tensor that its digest covers
MOST_ROWS = 4096  # of an image; of a larger one vision encoders would compute attention for minutes
_CLIP, _OF_IMAGES = "clip.", "clip.vision."


class ImageShape(NamedTuple):
    """What an image becomes: the size in pixels that it is scaled to, and its rows of a prompt, row-major.

    grid: (height, width) of the rows, whose product is `rows`. texts: what stands among them: before which row, and
    the names of control tokens.
    """

    width: int
    height: int
    rows: int
    grid: tuple[int, int]
    texts: tuple[tuple[int, str], ...] = ()

    def parts(self) -> list[range]:
        """The rows between texts."""
        edges = [0, *(row for row, _ in self.texts if row), self.rows]
        return [range(*pair) for pair in pairwise(edges)]


@dataclass(frozen=True)
class VisionEncoder:
    """A vision encoder. Each kind has a subclass with its sizes.

    before, after: the text around the rows of an image in a prompt, where names of control tokens are these tokens.
    filter: how images are scaled, a name of Pillow's `Resampling`. A row is made of merge × merge patches of
    patch × patch pixels. weights: a digest of samples of its weights, by which images are told apart, too.
    """

    kind: str  # the file in model_loaders/vision_encoders
    outputs: int  # E of the decoder
    before: str
    after: str
    filter: str
    layers: int
    hidden_size: int  # C
    heads: int
    ffn_size: int
    patch: int
    merge: int
    eps: float  # of norms
    weights: str = field(default="", compare=False, kw_only=True)

    @property
    def merged_channels(self) -> int:
        """C of the patches of a row."""
        return self.merge**2 * self.hidden_size


def loss(encoder: VisionEncoder, width: int, height: int) -> str:
    """A sentence about what an image of so many pixels loses, which the model's own processor keeps; mostly empty."""
    sentence: str = getattr(_module(encoder.kind), "loss", lambda *_: "")(encoder, width, height)
    return sentence


def fit(encoder: VisionEncoder, width: int, height: int) -> ImageShape:
    """What an image of so many pixels becomes."""
    shape: ImageShape = _module(encoder.kind).fit(encoder, width, height)
    return shape


def tensors(encoder: VisionEncoder) -> TensorTable:
    """Every tensor of a vision encoder, by the slot that it fills."""
    table: TensorTable = _module(encoder.kind).tensors(encoder)
    return table


def reads_images(config: ModelConfig) -> bool:
    """Whether a model may have a vision encoder of a known kind."""
    return any(_decodes(config, one) for one in _modules())


def belongs(encoder: VisionEncoder, config: ModelConfig) -> bool:
    """Whether a vision encoder's rows can stand among the embeddings of a model."""
    return _decodes(config, _module(encoder.kind)) and encoder.outputs == config.hidden_size


def may_belong(metadata: Mapping[str, object], config: ModelConfig) -> bool:
    """Whether an mmproj file with this metadata holds a vision encoder of a known kind for models of this family."""
    kinds = [one for one in _modules() if _kind_of(metadata) in getattr(one, "PROJECTORS", {})]
    return any(_decodes(config, one) for one in kinds)


def outputs_of(metadata: Mapping[str, object]) -> object:
    """E of the decoder, as the metadata of an mmproj file says it; None if it does not."""
    return metadata.get(f"{_OF_IMAGES}projection_dim")


def vision_encoder_of(folder: Path) -> tuple[VisionEncoder, StoredWeights] | None:
    """The vision encoder of the model in a folder, and its weights; None if it has none, or one of an unknown kind, or
    if its tensors were left out. Raises LoadError for one that is damaged."""
    fields = Fields.read(folder / "config.json")
    kind = fields.text("model_type", "")
    module = next((one for one in _modules() if kind in one.MODEL_TYPES), None)
    if module is None or fields.section("vision_config") is None:
        return None
    encoder: VisionEncoder = module.configure(fields, _preprocessor_fields(folder))
    weights = open_safetensors(folder, is_needed=lambda name: False)  # `_fitted` says what is missing
    prefixes: Mapping[str, str] = getattr(module, "PREFIXES", {})

    def ours(name: str) -> str:
        theirs = next(filter(name.startswith, prefixes), "")
        return prefixes.get(theirs, "") + name.removeprefix(theirs)

    with close_on_error(weights):
        file_tensors = {ours(name): tensor for name, tensor in weights.tensors.items()}
        names = {spec.row_parts.source if spec.row_parts else spec.name for spec in tensors(encoder).specs()}
        file_tensors = read_quantized(fields, file_tensors, names)
        if not file_tensors.keys() & names:
            weights.close()
            return None
        return _fit_weights(encoder, StoredWeights(folder, file_tensors, weights.open_files), is_gguf=False)


def open_mmproj(path: Path) -> tuple[VisionEncoder, StoredWeights]:
    """The vision encoder in a file of llama.cpp's, and its weights. Raises LoadError."""
    gguf = GgufFile(path)
    with close_on_error(gguf):
        metadata = gguf.metadata
        kind = _kind_of(metadata)
        read = next((one.PROJECTORS[kind] for one in _modules() if kind in getattr(one, "PROJECTORS", {})), None)
        if read is None:
            projector_types = sorted(name for one in _modules() for name in getattr(one, "PROJECTORS", {}))
            what = "no" if kind is None else f"of the kind {describe(kind)} a"
            raise LoadError(f"{path} holds {what} part that reads images; supported are {', '.join(projector_types)}.")
        values = {key.removeprefix(_OF_IMAGES): value for key, value in metadata.items()}
        fields = Fields(values, path, {key.removeprefix(_OF_IMAGES): key for key in metadata})
        encoder: VisionEncoder = read(fields, {name: tensor.shape for name, tensor in gguf.tensors.items()})
        names = {spec.gguf: spec.name for spec in tensors(encoder).specs()}
        file_tensors = {names.get(label, label): tensor for label, tensor in gguf.tensors.items()}
        return _fit_weights(encoder, StoredWeights(path, file_tensors, gguf.files), is_gguf=True)


def _decodes(config: ModelConfig, module: ModuleType) -> bool:
    """Whether models of this family may be the decoder of a kind of vision encoders."""
    of_text = getattr(module, "TEXT_FAMILIES", ())
    if getattr(module, "HAS_SECTIONS", False) and not config.has_sections:
        return False
    return config.family in module.MODEL_TYPES or (config.family, config.vocab_size) in of_text


def _kind_of(metadata: Mapping[str, object]) -> object:
    return metadata.get(f"{_OF_IMAGES}projector_type", metadata.get(f"{_CLIP}projector_type"))


def _preprocessor_fields(folder: Path) -> Fields:
    """How images are prepared, in preprocessor_config.json or in a part of processor_config.json."""
    fields = Fields.read(companion_in(folder, "preprocessor_config.json"), required=False)
    if not fields.present():
        fields = (
            Fields.read(companion_in(folder, "processor_config.json"), required=False).section("image_processor")
            or fields
        )
    return fields


def _fit_weights(
    encoder: VisionEncoder, weights: StoredWeights, *, is_gguf: bool
) -> tuple[VisionEncoder, StoredWeights]:
    """The vision encoder with its digest, and the weights of exactly its tensors. Raises LoadError."""
    module = _module(encoder.kind)
    take_apart = getattr(module, "take_apart", lambda encoder, tensors: tensors)
    interleaved = is_gguf and getattr(module, "INTERLEAVED", False)
    whole = StoredWeights(weights.where, take_apart(encoder, weights.tensors), weights.open_files)
    specs = [*tensors(encoder).specs()]
    file_tensors: dict[str, StoredTensor] = complete(whole, specs, "the part that reads images", is_gguf=is_gguf)
    tensors_of_encoder = {spec.name: arrange(file_tensors[spec.name], spec, interleaved, is_gguf) for spec in specs}
    digest = hashlib.sha256()
    for name, tensor in tensors_of_encoder.items():
        rows = min(tensor.shape[0], -(-_SAMPLE // tensor.row_bytes))
        digest.update(repr((name, tensor.dtype)).encode() + tensor.raw(slice(0, rows)).tobytes())
    return replace(encoder, weights=digest.hexdigest()), StoredWeights(
        weights.where, tensors_of_encoder, weights.open_files
    )


def _modules() -> list[ModuleType]:
    return [_module(one.name) for one in pkgutil.iter_modules(__path__) if not one.name.startswith("_")]


def _module(kind: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{kind}")
