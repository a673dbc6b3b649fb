"""`python -m scripts.save_as_folder MODEL.gguf FOLDER`: a model of the Llama family as BF16 safetensors."""

from __future__ import annotations

import argparse
import json
import struct
import sys
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models

from polarlm import model_loaders
from polarlm.model_loaders import LoadError, Model
from polarlm.model_loaders.files.gguf_file import GgufFile
from polarlm.model_loaders.tokenizers import patterns

_SHARD_BYTES = 5_000_000_000  # as usual on the hub


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.save_as_folder", description="Save as BF16 safetensors.")
    parser.add_argument("model", type=Path, metavar="MODEL.gguf", help="of the Llama family, with a byte-level BPE")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    try:
        options.folder.mkdir()
        save_as_folder(model_loaders.load(options.model), options.folder)
    except (LoadError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def save_as_folder(model: Model, folder: Path, shard_bytes: int = _SHARD_BYTES) -> Path:
    """Save `model`, from a GGUF file with a byte-level BPE vocabulary, in `folder`, and return the folder.

    shard_bytes: of a file of weights, but for the tensor that exceeds them. Raises LoadError for another family.
    """
    config = model.config
    if config.family != "llama":
        raise LoadError(f"{model.path} is of the family {config.family}, and only llama can be saved as a folder.")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": config.hidden_size,
                "intermediate_size": config.ffn.size,
                "num_hidden_layers": len(config.layers),
                "num_attention_heads": config.attention.heads,
                "num_key_value_heads": config.attention.kv_heads,
                "vocab_size": config.vocab_size,
                "max_position_embeddings": config.max_context,
                "rms_norm_eps": config.norm_eps,
                "rope_theta": config.attention.rope.theta,
                "tie_word_embeddings": config.tied_head,
                "eos_token_id": sorted(model.tokenizer.eos_ids),
                "torch_dtype": "bfloat16",
            }
        )
    )
    _write_shards(model, folder, shard_bytes)
    _write_tokenizer(model, folder)
    return folder


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 → bfloat16 bits (uint16), rounded to nearest, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_shards(model: Model, folder: Path, shard_bytes: int) -> None:
    names, size = sorted(model.weights.names()), 0
    shards: list[list[str]] = [[]]
    for name in names:
        size += 2 * int(np.prod(model.weights.shape(name)))
        shards[-1].append(name)
        if size > shard_bytes:
            shards, size = [*shards, []], 0
    shards = [shard for shard in shards if shard]
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        index |= dict.fromkeys(shard, file)
        header: dict[str, object] = {}
        offset = 0
        for name in shard:
            end = offset + 2 * int(np.prod(model.weights.shape(name)))
            header[name] = {"dtype": "BF16", "shape": model.weights.shape(name), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for name in shard:
                values = np.empty(model.weights.shape(name), np.float32)
                model.weights.read_into(name, values)
                out.write(to_bf16(values).tobytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _write_tokenizer(model: Model, folder: Path) -> None:
    gguf = GgufFile(model.path)
    tokens = list(gguf.metadata["tokenizer.ggml.tokens"])
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.metadata["tokenizer.ggml.merges"]]
    kinds = list(gguf.metadata["tokenizer.ggml.token_type"])
    words = gguf.metadata["tokenizer.ggml.pre"]
    gguf.close()
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = patterns.pre_tokenizer(words)
    bpe.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    bpe.save(str(folder / "tokenizer.json"))
    first, ends = model.tokenizer.bos_id, model.tokenizer.eos_ids
    settings = {"chat_template": model.template.source, "eos_token": tokens[min(ends)]}
    settings |= {"add_bos_token": first is not None, **({} if first is None else {"bos_token": tokens[first]})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    sys.exit(main())
