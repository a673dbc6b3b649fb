"""A .gguf file with random weights that takes milliseconds to load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from polarlm.bench.shapes import llama
from scripts.make_random_model import write
from tests.model_loaders.checkpoints import finish

TINY = llama(2, 256, 512, 4, 2, 64, 262, 512, 10_000.0)
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")


def random_model(folder: Path) -> Path:
    """The path of a model of shape TINY in Q8_0."""
    path = folder / "random-Q8_0.gguf"
    write(path, "tiny", TINY, "q8_0", tokenizer_file(folder))
    return path


def tokenizer_file(
    folder: Path, control: Sequence[str] = _CONTROL, text: Sequence[str] = (), template: str | None = None
) -> Path:
    """A .gguf file with nothing but a tokenizer of bytes: these control tokens, 262 tokens in all by default.

    text: tokens that are added, but are not control tokens; some of them may be among `control`. template: the chat
    template.
    """
    path = folder / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    added = list(dict.fromkeys([*control, *text]))
    spelt = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "he"]
    kinds = [gguf.TokenType.USER_DEFINED if name in text else gguf.TokenType.CONTROL for name in added]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*added, *spelt])
    writer.add_token_types([*map(int, kinds), *[int(gguf.TokenType.NORMAL)] * len(spelt)])
    writer.add_token_merges(["t h", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if template is not None:
        writer.add_chat_template(template)
    finish(writer)
    return path


def write_in_parts(path: Path, whole: Path, tensors: int) -> Path:
    """Write the model in the file `whole` in parts of `tensors` tensors, by gguf's own writer → the first part's path.

    path: the parts' path, without their numbers.
    """
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=tensors)
    _copy_fields(reader, writer, "general.architecture")
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return min(path.parent.glob(f"{path.stem}-*.gguf"))


def _copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, *others: str) -> None:
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in others:
            writer.add_key_value(
                name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )


def in_float32(path: Path, model: Path, rounded: gguf.GGMLQuantizationType | None = None) -> Path:
    """Write a model to `path` with its matrices in float32 and a BOS before texts; returns the path.

    rounded: a type to whose values matrices are rounded first.
    """
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(path, "llama")
    _copy_fields(reader, writer, "general.architecture", "general.file_type")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_add_bos_token(True)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if rounded is not None and values.ndim == 2:
            values = gguf.dequantize(gguf.quantize(values, rounded), rounded)
        writer.add_tensor(tensor.name, values.astype(np.float32))
    finish(writer)
    return path
