"""`python -m scripts.make_random_encoder --type TYPE OUT.gguf`: random weights in the shape of all-MiniLM-L6, to time.

Engines take the time that they take for the real model; the vectors mean nothing, and the tokens are numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

_LAYERS, _HIDDEN, _FFN, _HEADS, _VOCABULARY, _CONTEXT = 6, 384, 1536, 12, 30_522, 512
_CLS, _SEP, _UNK = 101, 102, 100
_TYPES = {"f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16, "q8_0": Type.Q8_0}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.make_random_encoder", description=__doc__.split("\n")[0])
    parser.add_argument("--type", choices=_TYPES, required=True, help="of the matrices")
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    options = parser.parse_args()
    write(options.out, options.type)


def write(out: Path, kind: str) -> None:
    """Write the model to `out`. kind: a key of _TYPES."""
    writer = gguf.GGUFWriter(out, "bert")
    writer.add_name(f"MiniLM-L6 random {kind.upper()}")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(_LAYERS)
    writer.add_head_count(_HEADS)
    writer.add_feed_forward_length(_FFN)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_token_type_count(2)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_tokenizer_model("bert")
    control = {_UNK: "[UNK]", _CLS: "[CLS]", _SEP: "[SEP]"}
    writer.add_token_list([control.get(i, f"▁{i}") for i in range(_VOCABULARY)])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i in control else gguf.TokenType.NORMAL for i in range(_VOCABULARY)]
    )
    writer.add_unk_token_id(_UNK)
    writer.add_bos_token_id(_CLS)
    writer.add_sep_token_id(_SEP)
    rng = np.random.default_rng(0)
    for name, shape in _tensors():
        if len(shape) == 1:
            writer.add_tensor(name, np.full(shape, name.endswith("norm.weight"), np.float32))
            continue
        values = rng.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
        # llama.cpp adds the rows of these two as float32.
        own = Type.F32 if name.startswith(("position", "token_types")) else _TYPES[kind]
        writer.add_tensor(name, gguf.quants.quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and the shape, (out, in) or (n,), of every tensor."""
    yield "token_embd.weight", (_VOCABULARY, _HIDDEN)
    yield "position_embd.weight", (_CONTEXT, _HIDDEN)
    yield "token_types.weight", (2, _HIDDEN)
    norms = ["token_embd_norm"]
    for layer in range(_LAYERS):
        own = {f"attn_{name}": (_HIDDEN, _HIDDEN) for name in ("q", "k", "v", "output")}
        for name, shape in (own | {"ffn_up": (_FFN, _HIDDEN), "ffn_down": (_HIDDEN, _FFN)}).items():
            yield f"blk.{layer}.{name}.weight", shape
            yield f"blk.{layer}.{name}.bias", shape[:1]
        norms += [f"blk.{layer}.attn_output_norm", f"blk.{layer}.layer_output_norm"]
    for name in norms:
        yield f"{name}.weight", (_HIDDEN,)
        yield f"{name}.bias", (_HIDDEN,)


if __name__ == "__main__":
    main()
