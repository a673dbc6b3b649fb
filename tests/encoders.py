"""Encoders with a vocabulary: the fixtures' weights, as folders of sentence-transformers and as GGUF files."""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from polarlm.model_loaders import load_weights
from polarlm.model_loaders.config import Experts
from polarlm.model_loaders.families import tensors
from scripts.make_random_model import add_value, metadata
from tests.conftest import ENCODERS
from tests.model_loaders.checkpoints import finish, joined_experts
from tests.weights import pack

VOCABULARY = 96
CONTROL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CLS, SEP = 2, 3
_WORDS = ("the", "rain", "falls", "on", "sea", "a", "ship", "ran", "he", "in", ",", ".", "##s", "##ing", "##er")


def pieces() -> list[str]:
    """A vocabulary of words, letters, and letters inside words."""
    letters = [form for letter in string.ascii_lowercase for form in (letter, f"##{letter}")]
    known = [*CONTROL, *dict.fromkeys([*_WORDS, *letters])]
    return [*known, *(f"[unused{i}]" for i in range(VOCABULARY - len(known)))]


def tokenizer_json() -> str:
    vocabulary = {piece: i for i, piece in enumerate(pieces())}
    library = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    library.add_special_tokens(list(CONTROL))
    return library.to_str()


def make_folder(folder: Path, name: str, pooling: str | None = "mean", **modules: Any) -> Path:
    """A folder in the layout of sentence-transformers; without `pooling`, one of transformers alone."""
    folder.mkdir(exist_ok=True)
    for file in ("config.json", "model.safetensors"):
        shutil.copy(_fixture(name) / file, folder)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    if pooling is not None:
        kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", **modules}
        listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in kinds.items()]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir()
        mode = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken", "max": "max_tokens"}
        written = {f"pooling_mode_{one}": kind == pooling for kind, one in mode.items()}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 1, **written}))
    return folder


def make_gemma(folder: Path) -> Path:
    """EmbeddingGemma with the modules that sentence-transformers has written."""
    shutil.copytree(ENCODERS / "embedding_gemma", folder)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    return folder


def make_reranker(folder: Path, name: str) -> Path:
    """A cross-encoder as a folder of transformers."""
    make_folder(folder, f"rerankers/{name}", None)
    if name in (others := {"xlm_roberta": unigram_json, "modernbert": bpe_json}):
        (folder / "tokenizer.json").write_text(others[name](), encoding="utf-8")
    return folder


_ARCHITECTURES = {"nomic_bert": "nomic-bert", "gemma3": "gemma-embedding", "modernbert": "modern-bert"}


def _fixture(name: str) -> Path:
    """The folder of an encoder, or of "rerankers/NAME"."""
    return ENCODERS.parent / name if "/" in name else ENCODERS / name


UNIGRAM = [
    *(("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)),
    *(("▁", -2.0), ("▁rain", -5.0), ("▁r", -4.0), ("ain", -4.5), ("s", -3.0), ("▁the", -3.5)),
    *((letter, -8.0 - at / 64) for at, letter in enumerate("abcdefghijklmnopqrtuvwxyz")),
]
"""Pieces of an XLM-R vocabulary, and their scores."""


def unigram_json() -> str:
    """XLM-R's tokenizer, as its files describe it."""
    library = tokenizers.Tokenizer(models.Unigram(UNIGRAM, unk_id=3))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    library.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    return library.to_str()


_MERGES = [("r", "a"), ("ra", "i"), ("rai", "n"), ("Ġ", "rain"), ("rain", "s"), ("Ġrain", "s")]
_BYTES = [*CONTROL, "Ġ", *map(chr, range(39, 123)), *map("".join, _MERGES)]


def bpe_json() -> str:
    """ModernBERT's tokenizer, with some of the bytes."""
    library = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(_BYTES)}, _MERGES))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    library.add_special_tokens(list(CONTROL))
    return library.to_str()


def make_gguf(
    path: Path,
    name: str,
    dtype: str = "F32",
    pooling: int | None = 1,
    *,
    unigram: bool = False,
    leave_out: str = "",
    **changes: object,
) -> Path:
    """The same model as a GGUF file, as llama.cpp's converter writes it, with matrices in a type.

    unigram: with an XLM-R vocabulary, not BERT's. leave_out: a tensor that the file lacks.
    """
    config, source, _ = load_weights(_fixture(name))
    has_experts = any(isinstance(layer.ffn, Experts) for layer in config.layers)
    arch = _ARCHITECTURES.get(config.family, "bert") + "-moe" * has_experts
    writer = gguf.GGUFWriter(path, arch)
    values = {**metadata(config), "pooling_type": pooling}
    if arch == "gemma-embedding":  # with the pattern of windows, which the converter leaves out
        values["attention.sliding_window_pattern"] = 2
        for number, dense in enumerate(config.dense, 2):
            writer.add_dense_features_dims(f"dense_{number}", dense.inputs, dense.outputs)
    if arch == "modern-bert":
        windows = [attention.window for attention in config.attentions.values()]
        values["attention.sliding_window"] = windows[1]
        values["attention.sliding_window_pattern"] = windows.index(None, 1) if None in windows[1:] else len(windows)
        values["rope.freq_base_swa"] = config.attentions[1].rope.theta
        values["hidden_activation"] = "gelu"
    if has_experts:
        values["moe_every_n_layers"] = 2
    for key, value in values.items():
        if value is not None:
            add_value(writer, f"{arch}.{key}", value)
    if arch == "modern-bert":
        _write_bpe(writer)
    elif unigram:
        _write_unigram(writer)
    else:
        _write_word_piece(writer)
    for key, value in changes.items():
        writer.add_key_value(f"{arch}.{key}", value, gguf.GGUFValueType.get_type(value))
    written: dict[str, np.ndarray] = {}
    for spec in tensors(config).specs():
        if spec.gguf == leave_out or spec.gguf.endswith("exps.bias"):  # which the converter leaves out
            continue
        values = np.empty(source.shape(spec.name), np.float32)
        source.read_into(spec.name, values)
        if spec.name == "model.positions.weight":  # the converter leaves out what is before the first position
            values = np.ascontiguousarray(values[config.first_position :])
        if values.ndim == 2 and dtype != "F32":
            writer.add_tensor(spec.gguf, pack(values, dtype.lower()), raw_dtype=gguf.GGMLQuantizationType[dtype])
        else:
            written[spec.gguf] = values
    for label, values in joined_experts(written).items():
        writer.add_tensor(label, values)
    source.close()
    finish(writer)
    return path


def _write_word_piece(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("bert")
    writer.add_token_list(
        [one if one[0] == "[" else one[2:] if one.startswith("##") else f"▁{one}" for one in pieces()]
    )
    writer.add_token_types([3 if one in CONTROL else 1 for one in pieces()])
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(CLS)
    writer.add_sep_token_id(SEP)


def _write_bpe(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("modern-bert")
    writer.add_token_list(_BYTES)
    writer.add_token_types([3 if one in CONTROL else 1 for one in _BYTES])
    writer.add_token_merges([" ".join(one) for one in _MERGES])
    writer.add_bos_token_id(CLS)
    writer.add_eos_token_id(SEP)
    writer.add_sep_token_id(SEP)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.add_add_sep_token(True)


def _write_unigram(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("t5")
    writer.add_token_list([piece for piece, _ in UNIGRAM])
    writer.add_token_scores([score for _, score in UNIGRAM])
    writer.add_token_types([3, 3, 3, 2, *[1] * (len(UNIGRAM) - 4)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)


def reference(name: str) -> list[tuple[list[int], np.ndarray]]:
    """The texts of a fixture, and their last hidden states in transformers (T, E)."""
    arrays = np.load(ENCODERS / name / "reference.npz")
    return [(arrays[f"ids{i}"].tolist(), arrays[f"states{i}"]) for i in range(sum(one[:3] == "ids" for one in arrays))]


def pooled(states: np.ndarray, pooling: str, dimensions: int | None = None) -> np.ndarray:
    """The vector of a text as sentence-transformers computes it, normalized, in float64."""
    row = {"mean": states.mean(0, dtype=np.float64), "cls": states[0], "last": states[-1]}[pooling][:dimensions]
    return row / np.linalg.norm(row.astype(np.float64))
