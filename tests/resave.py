"""Saves a loaded model in another file format."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from polarlm.model_loaders import Model
from polarlm.model_loaders.files.gguf_file import GgufFile

_SHARD_BYTES = 100 << 20


def save_as_folder(model: Model, folder: Path) -> Path:
    """`model`, from a GGUF file with a byte-level BPE vocabulary, as a folder of BF16 safetensors shards."""
    config = model.config
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
    _write_shards(model, folder)
    _write_tokenizer(model, folder)
    return folder


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 → bfloat16 bits (uint16), rounded to nearest, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_shards(model: Model, folder: Path) -> None:
    names, shards = sorted(model.weights.names()), [[]]
    size = 0
    for name in names:
        size += 2 * int(np.prod(model.weights.shape(name)))
        shards[-1].append(name)
        if size > _SHARD_BYTES:
            shards, size = [*shards, []], 0
    shards = [shard for shard in shards if shard]
    index = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        index |= dict.fromkeys(shard, file)
        header, offset = {}, 0
        for name in shard:
            end = offset + 2 * int(np.prod(model.weights.shape(name)))
            header[name] = {"dtype": "BF16", "shape": model.weights.shape(name), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for name in shard:
                values = np.empty(model.weights.shape(name), np.float32)
                model.weights.read_into(name, values)
                out.write(to_bf16(values).tobytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _write_tokenizer(model: Model, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    gguf = GgufFile(model.path, mmap=True)
    tokens = list(gguf.metadata["tokenizer.ggml.tokens"])
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.metadata["tokenizer.ggml.merges"]]
    kinds = list(gguf.metadata["tokenizer.ggml.token_type"])
    gguf.close()
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    bpe.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": model.template.source, "eos_token": "<|im_end|>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
