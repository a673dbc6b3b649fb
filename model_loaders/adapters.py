"""Reads LoRA adapters, which change matrices of a model by products of two small ones (Hu et al., 2021, section 4.1).

An adapter is a folder of peft, with adapter_config.json and adapter_model.safetensors, or a GGUF file of llama.cpp.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from polarlm.model_loaders.config import Attention, Experts, ModelConfig
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.families import gguf_layouts, is_interleaved, rows_alternate, table_name, tensors
from polarlm.model_loaders.fields import Fields, describe
from polarlm.model_loaders.files.file_bytes import FileBytes
from polarlm.model_loaders.files.gguf_file import GgufFile
from polarlm.model_loaders.files.safetensors_source import read_header
from polarlm.model_loaders.files.tensor_table import OF_EXPERTS, TensorSpec
from polarlm.model_loaders.files.tensors import READABLE, StoredWeights
from polarlm.model_loaders.hub.choice import ADAPTER_CONFIG as CONFIG
from polarlm.model_loaders.hub.choice import ADAPTER_WEIGHTS as WEIGHTS

MOST_RANK = 512
_PEFT = re.compile(r"(base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>A|B)(\.default)?\.weight")
_GGUF = re.compile(r"(?P<module>.+)\.weight\.lora_(?P<factor>a|b)")
# Parts of a tensor's name that say what it is, if it is not a low-rank factor.
_OTHER_KINDS = {
    "lora_magnitude_vector": "DoRA, which is not supported",
    "lora_embedding": "a change of embeddings, which is not supported",
    **dict.fromkeys(("lora_bias", ".bias"), "a bias, and biases are not supported"),
}
_VOCABULARY_REASON = "and adapters of embeddings and of the output head are not supported"
_JOINED = re.compile(r".*\blayers\.(?P<layer>\d+)\..*\bexperts(\.base_layer)?")  # of peft, all of a layer
_EXPERTS_REASON = "which is of experts: give their adapter as a folder of peft"
_REFUSED_SLOTS = {  # slots whose tensors cannot be changed
    **dict.fromkeys(("latent_in", "latent_out"), "which is around experts, and adapters of it are not supported"),
    "router": "which is a router of experts, and adapters of these are not supported",
    **dict.fromkeys(
        ("latent_keys", "latent_values"),
        "which makes keys and values of a latent vector, and adapters of it are not supported",
    ),
}
# Keys of peft that change what an adapter does, unless they are null, false or empty.
_REFUSED_KEYS = {
    "alora_invocation_tokens": "an activated LoRA, which acts behind its invocation tokens alone, is",
    "arrow_config": "a choice among several adapters (Arrow) is",
    "fan_in_fan_out": "an adapter of matrices (in, out), which no supported model has, is",
    "kasa_config": "KaSA is",
    "lora_bias": "biases are",
    "monteclora_config": "MonteCLoRA is",
    "use_bdlora": "BD-LoRA is",
    "use_dora": "DoRA is",
    "use_qalora": "QA-LoRA is",
    **dict.fromkeys(
        ("layer_replication", "modules_to_save", "trainable_token_indices"),
        "whole matrices, embeddings and copies of layers in adapters are",
    ),
}
_OTHER_BASES = ("pissa", "corda", "olora", "loftq")  # initialisations that change the base model, too
_OF_TRAINING = (  # keys of peft that say how an adapter came to be; ranks are those of its matrices
    *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout"),
    *("lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "r", "rank_pattern"),
    *("revision", "target_modules", "target_parameters", "task_type", "velora_config"),
)
_ALORA = "adapter.alora.invocation_tokens"
_OF_GGUF = *("adapter.type", "adapter.lora.alpha"), *("adapter.lora.task_name", "adapter.lora.prompt_prefix")
_LONGEST_PATTERN = 1000  # characters
_FFN_SLOTS = ("gate_up", "down", "shared_gate_up", "shared_down", "shared_gate", *OF_EXPERTS)


@dataclass(frozen=True, eq=False)
class Factors:
    """What an adapter adds to a matrix (out, in): b · a, which includes the adapter's own scale.

    a (rank, in), b (out, rank): float32.
    """

    a: np.ndarray
    b: np.ndarray

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter of one model. changes: by the names of the tensors that it changes, as in the model's table.

    dtype: "F16" or "BF16" if that is the type of all numbers in its file, else "F32". digest: of its numbers.
    """

    path: Path
    changes: Mapping[str, Factors]
    dtype: str
    digest: str


def read_adapter(path: Path, config: ModelConfig, *, is_gguf: bool) -> Adapter:
    """The adapter in a folder or a GGUF file. is_gguf: whether the model with this `config` was read from one.

    Raises LoadError for an adapter of another kind, for tensors that the model lacks or that cannot be changed, and
    for wrong shapes.
    """
    targets = _Targets(path, config, is_gguf)
    with ExitStack() as files:
        if path.is_dir():
            tensors_stored, scale_of = _open_folder(path, files)
            changed_modules = _collect(path, tensors_stored, _PEFT, targets.find_module)
        else:
            tensors_stored, scale_of, interleaved = _open_gguf(path, config, files)
            changed_modules = _collect(
                path, tensors_stored, _GGUF, lambda module, _shape: targets.find_gguf(module, interleaved)
            )
        changes: dict[str, Factors] = {}
        for module, pair, module_targets in changed_modules:
            a, b = (_values(tensors_stored, label) for label in pair)
            experts = module_targets[0].joined
            _check_rank(path, module, a, b, experts)
            of_experts = f"{module.removesuffix('.base_layer')}.{module_targets[0].parameter}"
            b *= np.float32(scale_of(of_experts if experts > 1 else module, len(a) // experts))
            for target in module_targets:
                changes[target.spec.name] = target.factors(path, module, a, b)
        dtypes = {tensors_stored.stored_dtype(label) for _, pair, _ in changed_modules for label in pair}
    if not changes:
        raise LoadError(f"{path} holds no low-rank factors, so it is not a LoRA adapter; give another one.")
    digest = hashlib.sha256()
    for name, factors in sorted(changes.items()):
        digest.update(repr((name, factors.a.shape, factors.b.shape)).encode())
        digest.update(factors.a.tobytes() + factors.b.tobytes())
    dtype = dtypes.pop() if len(dtypes) == 1 and dtypes <= {"F16", "BF16"} else "F32"
    return Adapter(path, changes, dtype, digest.hexdigest())


@dataclass(frozen=True)
class _Target:
    """A tensor of the table that an adapter changes. rows: which rows of the file's matrix it has, in its order; None:
    all rows."""

    spec: TensorSpec
    rows: Callable[[int], np.ndarray] | None
    joined: int = 1  # matrices of experts whose factors the file has in one
    expert: int = 0  # which of them this is
    parameter: str = ""  # what peft calls these matrices together

    def factors(self, path: Path, module: str, a: np.ndarray, b: np.ndarray) -> Factors:
        """The change of the tensor, taken from the change of the file's matrix."""
        out, columns = self.spec.shape
        # Rows of A follow each other by expert, and columns of B by rank: `ParamWrapper.get_delta_factors` of peft.
        a = a.reshape(self.joined, -1, a.shape[1])[self.expert]
        b = b.reshape(len(b), -1, self.joined)[..., self.expert]
        try:
            rows = b if self.rows is None else b[self.rows(len(b))]
        except (ValueError, IndexError):
            rows = b[:0]
        if a.shape[1] != columns or len(rows) != out:
            raise LoadError(
                f"{path}: the change of {module} is ({len(b)}, {len(a)}) times {a.shape}, but the model's matrix is "
                f"{self.spec.shape}; the adapter belongs to another base model."
            )
        return Factors(np.ascontiguousarray(a), np.ascontiguousarray(rows))


class _Targets:
    def __init__(self, path: Path, config: ModelConfig, is_gguf: bool) -> None:
        self._path, self._config, self._is_gguf = path, config, is_gguf
        self._specs: list[tuple[TensorSpec, str, int]] = []  # with their slots and layers
        self._refusals = dict.fromkeys(("lm_head.weight", "output.weight"), _VOCABULARY_REASON)  # name in a file → why
        table = tensors(config)
        for layer, slots in enumerate((*table.layers, table.top)):
            for slot, spec in ((slot, spec) for slot, specs in slots.items() for spec in specs):
                why = _VOCABULARY_REASON if slots is table.top else _REFUSED_SLOTS.get(slot)
                if why is not None:
                    whole = spec.row_parts and (spec.row_parts.source, spec.row_parts.gguf)
                    self._refusals |= dict.fromkeys((spec.name, spec.gguf.partition("[")[0], *(whole or ())), why)
                elif len(spec.shape) == 2 and not spec.flat:
                    self._specs.append((spec, slot, layer))
                    if slot in OF_EXPERTS:
                        self._refusals[spec.gguf.partition("[")[0]] = _EXPERTS_REASON

    def find_module(self, module: str, shape: tuple[int, ...]) -> list[_Target]:
        """The tensors that a module of peft stands for, whose change is of this shape. Raises LoadError if there is
        none."""
        if (match := _JOINED.fullmatch(module)) and (joined := self._find_joined(int(match["layer"]), shape)):
            return joined
        names = [table_name(self._config, f"{prefix}{module}.weight") for prefix in ("", "model.")]
        for name in names:
            entries = [
                entry
                for entry in self._specs
                if name in (entry[0].name, entry[0].copy_of, entry[0].row_parts and entry[0].row_parts.source)
            ]
            if entries:
                return [self._target(module, *entry) for entry in entries]
        raise self._unchangeable(module, names)

    def _find_joined(self, layer: int, shape: tuple[int, ...]) -> list[_Target]:
        """The matrices of a layer's experts that have this shape, those of gate and up together."""
        ffn = self._config.layers[layer].ffn if layer < len(self._config.layers) else None
        if not isinstance(ffn, Experts):
            return []
        for slot in OF_EXPERTS:
            specs = [spec for spec, at, number in self._specs if (at, number) == (slot, layer)]
            parts = len(specs) // ffn.count
            if shape == (parts * specs[0].shape[0], specs[0].shape[1]):
                rows = [partial(_rows_of_part, part, parts, rows_alternate(self._config)) for part in range(parts)]
                name = "down_proj" if slot == OF_EXPERTS[-1] else "gate_up_proj"
                return [_Target(one, rows[i % parts], ffn.count, i // parts, name) for i, one in enumerate(specs)]
        return []

    def find_gguf(self, module: str, interleaved: bool) -> list[_Target]:
        """The tensors that a tensor of a GGUF file stands for, without ".weight". Raises LoadError if there is none."""
        name = f"{module}.weight"
        entries = [entry for entry in self._specs if entry[0].gguf == name and not entry[0].copy_of]
        copies = [one for one in self._specs if one[0].copy_of in {entry[0].name for entry in entries}]
        if entries:
            return [self._target(module, *one, interleaved, is_whole=len(entries) == 1) for one in entries + copies]
        raise self._unchangeable(module, [name])

    def _target(
        self,
        module: str,
        spec: TensorSpec,
        slot: str,
        layer: int,
        interleaved: bool | None = None,  # for a tensor of a GGUF file
        is_whole: bool = False,
    ) -> _Target:
        is_attention, from_gguf = isinstance(self._config.layers[layer].mixer, Attention), interleaved is not None
        if from_gguf != self._is_gguf and not is_attention and slot not in _FFN_SLOTS:
            raise LoadError(
                f"{self._path} changes {module}, whose rows GGUF files have in another order than folders of "
                f"safetensors; give the adapter {'as a folder of peft' if from_gguf else 'as a GGUF file'}, as the "
                "model is."
            )
        order = spec.row_order(is_interleaved(self._config) if interleaved is None else interleaved)
        if spec.row_parts is not None and not is_whole:
            return _Target(spec, spec.row_parts.rows)
        return _Target(spec, None if order is None else lambda count: np.argsort(order))

    def _unchangeable(self, module: str, names: Sequence[str]) -> LoadError:
        why = next((self._refusals[name] for name in names if name in self._refusals), None)
        if why is None:
            why = f"which a {self._config.family} model with {len(self._config.layers)} layers does not have"
            why += ", or does not have as a matrix of its own; choose an adapter of this base model"
        return LoadError(f"{self._path} changes {module}, {why}.")


def _rows_of_part(part: int, parts: int, alternate: bool, count: int) -> np.ndarray:
    """The rows of one of several matrices of equal size among `count` rows, in which they follow each other, or
    `alternate`."""
    return np.arange(count).reshape((-1, parts) if alternate else (parts, -1))[
        (slice(None), part) if alternate else part
    ]


def _collect(
    path: Path,
    weights: StoredWeights,
    pattern: re.Pattern[str],
    find: Callable[[str, tuple[int, ...]], list[_Target]],
) -> list[tuple[str, tuple[str, str], list[_Target]]]:
    """For each changed module its name, the labels of its two factors, and what it stands for."""
    pairs: dict[str, dict[str, str]] = {}
    for label in sorted(weights.names()):
        match = pattern.fullmatch(label)
        if match is None:
            kind = next((what for part, what in _OTHER_KINDS.items() if part in label), None)
            kind = kind or "no low-rank factor, and nothing else is supported"
            raise LoadError(
                f"{path} has the tensor {label!r}, which is {kind}; use an adapter with low-rank factors alone."
            )
        pairs.setdefault(match["module"], {})[match["factor"].lower()] = label
    for module, pair in pairs.items():
        if missing_factors := {"a", "b"} - pair.keys():
            raise LoadError(
                f"{path} lacks factor {missing_factors.pop().upper()} of {module}; download the adapter completely."
            )
    return [
        (module, (pair["a"], pair["b"]), find(module, weights.shape(pair["b"])[:1] + weights.shape(pair["a"])[-1:]))
        for module, pair in pairs.items()
    ]


def _values(weights: StoredWeights, label: str) -> np.ndarray:
    shape, dtype = weights.shape(label), weights.stored_dtype(label)
    if len(shape) != 2 or dtype not in READABLE:
        raise LoadError(
            f"{weights.where}: the tensor {label!r} is {dtype} {shape}, but a factor is a matrix of numbers."
        )
    values = np.empty(shape, np.float32)
    weights.read_into(label, values)
    if not np.isfinite(values).all():
        raise LoadError(f"{weights.where}: the tensor {label!r} has values that are not finite; download it again.")
    return values


def _check_rank(path: Path, module: str, a: np.ndarray, b: np.ndarray, experts: int) -> None:
    """experts: whose factors these are together."""
    if len(a) != b.shape[1] or len(a) % experts:
        raise LoadError(
            f"{path}: the factors of {module} are {b.shape} and {a.shape}, which cannot be multiplied; download it "
            "again."
        )
    if not 1 <= (rank := len(a) // experts) <= MOST_RANK:
        raise LoadError(f"{path}: the rank of {module} is {rank}, but 1 to {MOST_RANK} are supported.")


# -- peft ----------------------------------------------------------------------------------------------------------


_ScaleOf = Callable[[str, int], float]
"""scale_of(module, rank) → the factor of b · a."""


def _open_folder(folder: Path, files: ExitStack) -> tuple[StoredWeights, _ScaleOf]:
    fields = Fields.read(folder / CONFIG)
    _check_configuration(fields)
    if not (folder / WEIGHTS).is_file():
        is_pickle = (folder / "adapter_model.bin").is_file()
        why = "holds its weights as a pickle (adapter_model.bin), which can run any code when opened and is not read"
        raise LoadError(f"{folder} {why if is_pickle else f'lacks {WEIGHTS}'}; use an adapter with safetensors.")
    file = FileBytes(folder / WEIGHTS)
    files.callback(file.close)
    by_module = fields.section("alpha_pattern")
    alphas = [] if by_module is None else [*_alphas(by_module)]
    alpha, is_root = fields.number("lora_alpha", 8.0), fields.flag("use_rslora", False)
    fields.warn_of_unread(_OF_TRAINING)

    def scale_of(module: str, rank: int) -> float:
        module_alpha = next((own for pattern, own in alphas if pattern.match(module)), alpha)
        return module_alpha / (math.sqrt(rank) if is_root else rank)

    return StoredWeights(folder, read_header(file), [file]), scale_of


def _alphas(by_module: Fields) -> Iterator[tuple[re.Pattern[str], float]]:
    """The names of modules that have alphas of their own, as expressions; the first that matches counts, as in peft."""
    for key in by_module.names():
        try:
            if len(key) > _LONGEST_PATTERN:
                raise OverflowError(f"it has more than {_LONGEST_PATTERN:,} characters")
            yield re.compile(rf"(.*\.)?({key})$"), by_module.number(key)
        except (re.error, OverflowError, RecursionError) as problem:
            raise LoadError(
                f"{by_module.where}: {describe(key)} is no regular expression that can be used ({problem}); use "
                "another LoRA adapter."
            ) from None


def _check_configuration(fields: Fields) -> None:
    if (kind := fields.text("peft_type", "LORA")) != "LORA":
        raise fields.refuse("peft_type", f"but LORA adapters alone are supported, not {kind}")
    for key in _REFUSED_KEYS:
        if fields.value(key):
            raise fields.refuse(key, f"but {_REFUSED_KEYS[key]} not supported; use another LoRA adapter")
    if fields.text("bias", "none") != "none":
        raise fields.refuse("bias", "but adapters with biases are not supported; use one without")
    if str(fields.value("init_lora_weights")).lower().startswith(_OTHER_BASES):
        raise fields.refuse(
            "init_lora_weights",
            "with which peft changes the base model, too; use one that is converted to a plain LoRA",
        )


# -- GGUF ----------------------------------------------------------------------------------------------------------


def _open_gguf(path: Path, config: ModelConfig, files: ExitStack) -> tuple[StoredWeights, _ScaleOf, bool]:
    """Its tensors, their scale, and whether RoPE's pairs are neighbouring channels."""
    gguf = GgufFile(path)
    files.callback(gguf.close)
    kinds = gguf.metadata.get("general.type"), gguf.metadata.get("adapter.type")
    if kinds != ("adapter", "lora"):
        raise LoadError(
            f"{path} is no LoRA adapter: its general.type and adapter.type are {describe(kinds[0])} and "
            f"{describe(kinds[1])}."
        )
    arch, layouts = gguf.metadata.get("general.architecture"), gguf_layouts()
    family, layout = layouts.get(str(arch), ("", None))
    has_layout = any(config.family == name for name, _ in layouts.values())  # other families call themselves llama
    if layout is None or family != (config.family if has_layout else "llama"):
        raise LoadError(
            f"{path} is an adapter of a model of architecture {describe(arch)}, and this is a {config.family} model; "
            "choose an adapter of this base model."
        )
    fields = Fields({key: value for key, value in gguf.metadata.items() if key.startswith("adapter.")}, path)
    if fields.value(_ALORA):
        raise fields.refuse(_ALORA, f"but {_REFUSED_KEYS['alora_invocation_tokens']} not supported; use another one")
    fields.warn_of_unread(_OF_GGUF)
    alpha = gguf.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise LoadError(f"{path}: adapter.lora.alpha is {describe(alpha)}, but must be a number.")

    def scale_of(module: str, rank: int) -> float:
        return alpha / rank if alpha else 1.0

    return StoredWeights(path, gguf.tensors, gguf.files), scale_of, layout.is_interleaved(config)
