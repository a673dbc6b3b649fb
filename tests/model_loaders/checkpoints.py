"""Checkpoints for the loader's tests: the stored tiny models, and files written on the spot."""

import json
import re
import shutil
import struct
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import gguf
import numpy as np

from polarlm.model_loaders import ModelConfig, WeightSource, families, load_weights
from polarlm.model_loaders.config import Attention, Experts, GatedMLP, Layer
from polarlm.model_loaders.files.gguf_file import GgufFile
from polarlm.model_loaders.files.tensors import StoredWeights
from scripts.make_random_model import add_value, metadata

MODELS = Path(__file__).resolve().parents[1] / "fixtures" / "models"
NAMES = sorted(folder.name for folder in MODELS.iterdir())


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in families.tensors(config).specs()}


def copied(name: str, folder: Path, **settings: object) -> Path:
    """A stored model with other values in its configuration, or without a key for None."""
    shutil.copytree(MODELS / name, folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text.update(settings)
    for key in [key for key, value in settings.items() if value is None]:
        del text[key]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(path: Path) -> ModelConfig:
    config, weights, _ = load_weights(path)
    weights.close()
    return config


def read(weights: WeightSource, name: str) -> np.ndarray:
    out = np.full(weights.shape(name), np.nan, np.float32)
    weights.read_into(name, out)
    return out


def read_all(weights: WeightSource) -> dict[str, np.ndarray]:
    return {name: read(weights, name) for name in weights.names()}


def safetensors_file(path: Path, header: object, data: bytes = b"") -> Path:
    """A safetensors file with this header (bytes are written unchanged)."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


_LFM2 = {"1": "gate", "2": "down", "3": "up"}


def gguf_name(name: str, arch: str = "qwen3") -> str:
    """The name that ggml gives a tensor of this architecture; qwen3's name if the loader does not know it."""
    official = _official_names(arch if arch in families.gguf_layouts() else "qwen3")
    expert = re.search(r"\.experts\.(\d+)|[kv]_b_proj\.(\d+)", name)
    whole = name if expert is None else name.replace(expert[0], expert[0].rpartition(".")[0])
    spelt = re.sub(r"feed_forward\.experts\.w([123])", lambda one: f"mlp.experts.{_LFM2[one[1]]}_proj", whole)
    spelt = re.sub(r"block_sparse_moe(\.experts\.[gud])", r"mlp\1", spelt)
    spelt = re.sub("expert_bias$", "expert_bias.bias", spelt)
    spelt = spelt.replace("correction_bias", "correction.bias").replace("attn.sinks", "attn.sinks.weight")
    spelt = re.sub("layer_scalar$", "layer_scalar.weight", spelt)
    if spelt.endswith(("router.scale", "per_expert_scale")):
        of = "router.proj" if spelt.endswith("router.scale") else "experts.down_proj"
        label = official.get_name(re.sub(r"router\.\w+$", of, spelt))
        return f"{label}.scale"
    label = official.get_name(spelt, try_suffixes=(".weight", ".bias"))
    assert label is not None, name
    return label if expert is None else f"{label}[{expert[1] or expert[2]}]"


@cache
def _official_names(arch: str) -> gguf.TensorNameMap:
    """Made once: that takes as long as a small model takes to load."""
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(architectures[arch], 8)


def joined_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors by ggml's names. The same matrix of all experts becomes one tensor, as in ggml."""
    joined: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        label, _, number = name.removesuffix("]").partition("[")
        joined.setdefault(label, {})[int(number or 0)] = tensor
    return {
        label: np.stack([parts[i] for i in range(len(parts))]) if len(parts) > 1 else parts[0]
        for label, parts in joined.items()
    }


# Architectures whose rows of queries and keys are in another order in GGUF files.
INTERLEAVED = ("llama", "smollm3", "granite", "granitemoe", "mistral3", "ernie4_5", "command-r", "cohere2")


def interleaved(tensor: np.ndarray, heads: int) -> np.ndarray:
    """q or k as llama.cpp's converter writes it for these architectures: channel j beside channel j + D/2."""
    halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def gguf_header(path: Path, arch: str, config: ModelConfig, **changes: object) -> gguf.GGUFWriter:
    """A writer with the metadata of `config`, without the scaling of RoPE; `changes` are further keys, with `__` for
    the dots, and None for keys to leave out."""
    writer = gguf.GGUFWriter(path, arch)
    values = {key: value for key, value in metadata(config).items() if not key.startswith("rope.scaling")}
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    values = {key: value for key, value in values.items() if value is not None}
    for ffn in (layer.ffn for layer in config.layers if isinstance(layer.ffn, Experts)):
        values |= {"expert_weights_scale": ffn.scale, "expert_weights_norm": ffn.renormalize}
        values |= {"moe_latent_size": ffn.latent} if ffn.latent else {}
    for key, value in values.items():
        add_value(writer, key if key.startswith("split.") else f"{arch}.{key}", value)
    return writer


def granite_config(settings: Mapping[str, object]) -> dict[str, object]:
    """Further metadata of Granite's models. settings: in config.json."""
    keys = {"attention__layer_norm_rms_epsilon": "rms_norm_eps", "attention__scale": "attention_multiplier"}
    keys |= {"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}
    return {ours: settings[theirs] for ours, theirs in {**keys, "logit_scale": "logits_scaling"}.items()}


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rotated_in_front(tensor: np.ndarray, config: ModelConfig, heads: int, *, neighbours: bool = False) -> np.ndarray:
    """Rows of heads in the order of files in which RoPE rotates the first channels only, or pairs of neighbours."""
    if config.attention.rotary_dim is None:
        return tensor
    half, pairs, dim = config.attention.head_dim // 2, config.attention.rotary_dim // 2, config.attention.head_dim
    rotated, rows = heads * dim, tensor[: heads * dim].reshape(heads, dim, -1)
    pairs_in_order = [[*range(pairs)], [*range(half, half + pairs)]]
    rotated_order = np.array(pairs_in_order).ravel("F" if neighbours else "C")
    order = [*rotated_order, *range(pairs, half), *range(half + pairs, dim)]
    return np.concatenate([rows[:, order].reshape(tensor[:rotated].shape), tensor[rotated:]])


def as_gguf(path: Path, arch: str, config: ModelConfig, tensors: dict[str, np.ndarray], **changes: object) -> Path:
    """The model as llama.cpp's converter writes it, in F32; tensors with ggml's names are not changed."""
    writer, written = gguf_header(path, arch, config, **changes), {}
    for name, tensor in tensors.items():
        if arch in INTERLEAVED and (of := re.search(r"\.([qk])_proj\.", name)):
            tensor = interleaved(tensor, config.attention.heads if of[1] == "q" else config.attention.kv_heads)
        heads = {
            "qkv_proj": config.attention.heads + config.attention.kv_heads,
            "q_proj": config.attention.heads,
            "k_proj": config.attention.kv_heads,
            "q_norm": config.attention.heads if config.attention.qk_norm == "all" else 1,
            "k_norm": config.attention.kv_heads if config.attention.qk_norm == "all" else 1,
        }
        if (projection := name.split(".")[-2]) in heads:
            neighbours = arch == "glm4" and not config.has_sections
            tensor = rotated_in_front(tensor, config, heads[projection], neighbours=neighbours)
        written[gguf_name(name, arch) if name.startswith(("model.", "lm_head.")) else name] = tensor
    for label, tensor in joined_experts(written).items():
        writer.add_tensor(label, tensor)
    finish(writer)
    return path


def quantized_model(path: Path, dtype: str, extra: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """Writes a model whose matrices are random blocks of this type; returns its tensors.

    extra: further tensors in float32, by the names in the file.
    """
    config = load_weights(MODELS / "llama_mha")[0]
    layer = Layer(Attention(4, 2, 64, config.attention.rope), GatedMLP(256))
    config = replace(
        config,
        layers=(layer,),
        hidden_size=256,
        vocab_size=96,
    )
    writer, tensors = gguf_header(path, "llama", config), {}
    random = np.random.default_rng(5)
    for name, (rows, *columns) in shapes(config).items():
        if not columns:
            tensors[name] = np.ones(rows, np.float32)
            writer.add_tensor(gguf_name(name), tensors[name])
            continue
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
        raw = random.integers(0, 64, (rows, columns[0] // block * block_bytes), dtype=np.uint8)
        tensors[name] = gguf.dequantize(raw, gguf.GGMLQuantizationType[dtype])
        heads = {"q_proj": config.attention.heads, "k_proj": config.attention.kv_heads}.get(name.split(".")[-2])
        raw = interleaved(raw, heads) if heads else raw
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(raw), raw_dtype=gguf.GGMLQuantizationType[dtype])
    for label, values in (extra or {}).items():
        writer.add_tensor(label, values)
    finish(writer)
    return tensors


def one_gguf_tensor(path: Path, dtype: str, raw: np.ndarray) -> StoredWeights:
    """A GGUF file that holds the tensor "x"; `raw` is uint8 (rows, bytes of a row)."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("first", np.arange(3, dtype=np.float32))  # so that "x" lies behind padding
    writer.add_tensor("x", raw, raw_dtype=gguf.GGMLQuantizationType[dtype])
    finish(writer)
    file = GgufFile(path)
    return StoredWeights(path, {"x": file.tensors["x"]}, file.files)
