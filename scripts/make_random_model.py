"""`python -m scripts.make_random_model --shape SHAPE --type TYPE OUT.gguf`: a model with random weights, to time.

Its matrices have the sizes and the weight formats of a real model, so that engines take the time that they take for
the real one. Its text means nothing: its tokens are numbers, and the bytes of a text for a decoder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from tqdm import tqdm

from polarlm.bench.random_weights import KINDS, RandomMatrix, matrix_types, vector
from polarlm.bench.shapes import SHAPES
from polarlm.engine.weight_formats import get
from polarlm.model_loaders import families
from polarlm.model_loaders.config import (
    Attention,
    Experts,
    GatedDelta,
    GatedMLP,
    LatentAttention,
    ModelConfig,
    Recurrent,
    ShortConv,
)
from polarlm.model_loaders.files.tensor_table import TensorSpec

_TOKENS, _TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_FILE_TYPES = {"q4_k": "MOSTLY_Q4_K_M", "mxfp4": "MOSTLY_MXFP4_MOE", "f32": "ALL_F32"}
_UNK, _CLS, _SEP = 100, 101, 102  # BERT's ids


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.make_random_model", description=__doc__.split("\n")[2])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--type", choices=KINDS, required=True, help="q4_k is the mixture Q4_K_M")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N layers")
    parser.add_argument("--mtp", action="store_true", help="with a layer that predicts several tokens")
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    options = parser.parse_args()
    config = SHAPES[options.shape]
    if options.layers is not None:
        config = replace(config, layers=config.layers[: max(1, options.layers)])
    if options.mtp:
        config = config.with_mtp()
    try:
        write(options.out, options.shape, config, options.type)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def write(out: Path, name: str, config: ModelConfig, kind: str, tokenizer: Path | None = None) -> None:
    """Write a model with random weights to `out`.

    kind: one of KINDS. tokenizer: a .gguf file whose tokenizer is copied, filled up with unused tokens to the size of
    the vocabulary; None for tokens that are numbers.
    """
    architectures = {family: layout.architecture for family, layout in families.gguf_layouts().values()}
    writer = gguf.GGUFWriter(out, architectures.get(config.family, "llama"))
    writer.add_name(f"Random {name}")
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES.get(kind, f"MOSTLY_{kind.upper()}")])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in metadata(config).items():
        add_value(writer, f"{writer.arch}.{key}", value)
    if tokenizer is None and config.is_encoder:
        _add_numbered_words(writer, config.vocab_size)
    elif tokenizer is None:
        _add_numbered_tokens(writer, config.vocab_size)
    else:
        config = replace(config, vocab_size=_copy_tokenizer(writer, tokenizer, config.vocab_size))
    tensors = _tensors(config, matrix_types(config, kind))
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, *tensor.info())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    total = sum(tensor.nbytes for tensor in tensors)
    with tqdm(total=total, desc=f"Writing {out.name}", unit="B", unit_scale=True, leave=False, disable=None) as bar:
        for tensor in tensors:
            writer.write_tensor_data(tensor.data())
            bar.update(tensor.nbytes)
    writer.close()


# -- metadata ------------------------------------------------------------------------------------------------------


def metadata(config: ModelConfig) -> dict[str, Any]:
    """Key without the architecture → value, as llama.cpp's converter writes them."""
    attention, mixers = config.attention, [layer.mixer for layer in config.layers]
    ffns = [layer.ffn for layer in config.layers if layer.ffn is not None]
    heads = [mixer.kv_heads if isinstance(mixer, Attention) else 0 for mixer in mixers]
    keys: dict[str, Any] = {
        "block_count": len(config.layers),
        "context_length": config.max_context,
        "embedding_length": config.hidden_size,
        "feed_forward_length": next((ffn.size for ffn in ffns if isinstance(ffn, GatedMLP)), ffns[0].size),
        "attention.head_count": attention.heads,
        "attention.head_count_kv": attention.kv_heads,
    }
    if config.mtp:
        keys["nextn_predict_layers"] = 1
    if config.is_encoder:
        keys["pooling_type"] = int(gguf.PoolingType.MEAN)
    if config.norms_inputs:
        keys |= {"attention.layer_norm_epsilon": config.norm_eps, "attention.causal": False}
        keys["token_type_count"] = config.token_types
    else:
        keys |= {
            "attention.key_length": attention.head_dim,
            "attention.value_length": attention.head_dim,
            "rope.dimension_count": attention.rotated,
            f"attention.layer_norm_{'' if config.centred else 'rms_'}epsilon": config.norm_eps,
        }
    if isinstance(attention, LatentAttention):
        keys |= {
            "attention.value_length": attention.latent,
            "attention.key_length_mla": attention.own_dim + attention.rotated,
            "attention.value_length_mla": attention.value_dim,
            "attention.kv_lora_rank": attention.latent,
            **({"attention.q_lora_rank": attention.query_latent} if attention.query_latent else {}),
        }
        if attention.rope is not None and attention.rope.mscale_all_dim:
            keys["rope.scaling.yarn_log_multiplier"] = 0.1 * attention.rope.mscale_all_dim
    whole = next((mixer for mixer in config.attentions.values() if mixer.window is None and mixer.rope), attention)
    if whole.rope is not None:
        keys["rope.freq_base"] = whole.rope.theta
        if whole.rope.kind == "yarn":
            keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": whole.rope.factor}
            keys["rope.scaling.original_context_length"] = whole.rope.original_context
    if attention.window is not None:
        keys["attention.sliding_window"] = attention.window
    for ffn in ffns:
        if isinstance(ffn, Experts):
            keys |= {"expert_count": ffn.count, "expert_used_count": ffn.top_k, "expert_feed_forward_length": ffn.size}
            if ffn.shared is not None:
                keys["expert_shared_feed_forward_length"] = ffn.shared.size
                keys["expert_shared_count"] = ffn.shared.size // ffn.size
    for mixer in dict.fromkeys(mixers):
        if isinstance(mixer, ShortConv):
            keys |= {"attention.head_count_kv": heads, "shortconv.l_cache": mixer.width}
        if isinstance(mixer, GatedDelta):
            keys |= {
                "rope.dimension_sections": [11, 11, 10, 0],
                "ssm.conv_kernel": mixer.width,
                "ssm.state_size": mixer.key_dim,
                "ssm.group_count": mixer.key_heads,
                "ssm.time_step_rank": mixer.value_heads,
                "ssm.inner_size": mixer.value_heads * mixer.value_dim,
                "full_attention_interval": 1 + next(number for number, count in enumerate(heads) if count),
            }
    return keys


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a number, a text or a list of numbers with the type that files have."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def _add_numbered_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    """Add a vocabulary of SentencePiece: three control tokens, the bytes, and numbers as words."""
    kinds = {"<unk>": gguf.TokenType.UNKNOWN, "<s>": gguf.TokenType.CONTROL, "</s>": gguf.TokenType.CONTROL}
    kinds |= {f"<0x{byte:02X}>": gguf.TokenType.BYTE for byte in range(256)}
    names = [*kinds, *(f"▁{number}" for number in range(len(kinds), count))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([-float(number) for number in range(len(names))])
    writer.add_token_types([int(kinds.get(name, gguf.TokenType.NORMAL)) for name in names])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _add_numbered_words(writer: gguf.GGUFWriter, count: int) -> None:
    """Add a vocabulary of BERT whose words are numbers."""
    control = {_UNK: "[UNK]", _CLS: "[CLS]", _SEP: "[SEP]"}
    kinds = [gguf.TokenType.CONTROL if i in control else gguf.TokenType.NORMAL for i in range(count)]
    writer.add_tokenizer_model("bert")
    writer.add_token_list([control.get(i, f"▁{i}") for i in range(count)])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(_UNK)
    writer.add_bos_token_id(_CLS)
    writer.add_sep_token_id(_SEP)


def _copy_tokenizer(writer: gguf.GGUFWriter, path: Path, vocabulary: int) -> int:
    """Copy all about the tokenizer, with tokens up to `vocabulary` that stand for nothing → the number of tokens."""
    fields = {name: field for name, field in gguf.GGUFReader(path).fields.items() if name.startswith("tokenizer.")}
    more = range(len(fields[_TOKENS].contents()), vocabulary)
    added = {_TOKENS: [f"<unused{i}>" for i in more], _TOKEN_TYPES: [int(gguf.TokenType.UNUSED)] * len(more)}
    for name, field in fields.items():
        value = [*field.contents(), *added[name]] if name in added else field.contents()
        writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    return max(more.start, vocabulary)


# -- tensors -------------------------------------------------------------------------------------------------------


@dataclass
class _Tensor:
    """A tensor of the file. spec: the table's first tensor in it. shape: as the file has it. type: its format."""

    name: str
    spec: TensorSpec
    shape: tuple[int, ...]
    type: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * get(self.type).size(self.shape[-1])

    def info(self) -> tuple[list[int], np.dtype[Any], int, Type]:
        """The shape, its dtype, the number of bytes and the type, as the writer wants them."""
        is_plain = self.type == "f32"
        columns = self.shape[-1] if is_plain else get(self.type).size(self.shape[-1])
        dtype = np.dtype(np.float32 if is_plain else np.uint8)
        return [*self.shape[:-1], columns], dtype, self.nbytes, Type[self.type.upper()]

    def data(self) -> np.ndarray:
        if len(self.spec.shape) == 1:
            return vector(replace(self.spec, shape=(prod(self.shape),)))
        rows = prod(self.shape[:-1])
        return RandomMatrix(self.type, rows, self.shape[-1], self.name).raw(slice(0, rows))


def _tensors(config: ModelConfig, types: Mapping[str, str]) -> list[_Tensor]:
    """The tensors of a file by llama.cpp's names, which several tensors of the table may share."""
    by_name: dict[str, list[TensorSpec]] = {}
    for spec in families.tensors(config).specs():
        if not spec.copy_of:
            by_name.setdefault(spec.gguf.partition("[")[0], []).append(spec)
    tensors = []
    for name, (spec, *more) in by_name.items():
        rows, *columns = spec.shape
        shape: tuple[int, ...] = rows * (1 + len(more)), *columns
        if spec.gguf.endswith("]"):  # all experts
            shape = 1 + len(more), *spec.shape
        if spec.flat and "conv" in name:
            mixer = config.layers[int(name.split(".")[1])].mixer
            assert isinstance(mixer, ShortConv | Recurrent)
            shape = rows // mixer.width, mixer.width
        tensors.append(_Tensor(name, spec, shape, types.get(spec.name, "f32")))
    return tensors


if __name__ == "__main__":
    sys.exit(main())
