"""Trains the small hybrid under tests/fixtures/trained_hybrid with transformers, on a text of short stories.

    python -m venv reference && reference/bin/pip install torch transformers
    reference/bin/python scripts/train_hybrid.py stories.txt FOLDER [--minutes 60]

Random weights say little about what a coded state costs: theirs holds nothing that a later token needs. This model has
the layers of Qwen3.5, three gated delta rules to one of attention, with key and value heads of its sizes (128 × 128),
and 3.5 million parameters in all, so that an hour of one core teaches it to tell a story.

The file has stories that are separated by lines of `<|endoftext|>`. The last ones are held out, and the model's
perplexity on them is printed. FOLDER gets a tokenizer, the weights as bfloat16, the held-out stories and the logits of
some of their tokens (`reference.npz`, as `make_fixtures.py` describes it).

Matrices are trained with Muon (Jordan et al., 2024), the rest with AdamW. The learning rate falls to 0 at the end of
the time, so a machine that does more steps gives a better model, and no two runs give the same one.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

END = "<|endoftext|>"
VOCABULARY, CONTEXT, BATCH = 1024, 512, 8
HELD_OUT = 40_000  # tokens
REFERENCE = 160  # tokens whose logits are kept
MATRICES_RATE, REST_RATE, WARM_UP = 5e-3, 3e-3, 0.03
SEED = 20_261_124


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small hybrid on stories.")
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    options.folder.mkdir(parents=True, exist_ok=True)

    stories = [story.strip() for story in options.text.read_text(encoding="utf-8").split(END)]
    tokenizer = train_tokenizer(stories)
    write_tokenizer(tokenizer, options.folder)
    ids = np.concatenate([[0, *one.ids] for one in tokenizer.encode_batch([story for story in stories if story])])
    train, held_out = torch.from_numpy(ids[:-HELD_OUT]), torch.from_numpy(ids[-HELD_OUT:])
    print(f"{len(train):,} tokens to train on, {len(stories):,} stories, {sum(map(len, stories)):,} characters")
    model = new_model()
    print(f"{sum(one.numel() for one in model.parameters()):,} parameters")
    fit(model, train, options.minutes * 60)
    narrow = Qwen3_5ForCausalLM(model.config).bfloat16()
    narrow.load_state_dict(model.state_dict())
    narrow.save_pretrained(options.folder)
    stored = narrow.float().eval()
    print(f"held out, model: perplexity {math.exp(held_out_loss(stored, held_out)):.3f}")
    write_reference(stored, tokenizer, held_out, options.folder)


def train_tokenizer(stories: list[str]) -> Tokenizer:
    """Byte pairs of a small vocabulary, whose token 0 is END."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(stories, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """The tokenizer's files. A sequence begins with END, as every story did in training."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": END, "eos_token": END, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def new_model() -> Qwen3_5ForCausalLM:
    """The model, whose heads decay by 1/e within 10 to 1000 tokens at first."""
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
        bos_token_id=0,
        eos_token_id=0,
    )
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for layer, kind in zip(model.model.layers, config.layer_types, strict=True):
            if kind == "linear_attention":
                rates = torch.exp(torch.empty_like(layer.linear_attn.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)))
                layer.linear_attn.A_log.zero_()
                layer.linear_attn.dt_bias.copy_(torch.log(torch.expm1(rates)))
    return model


def fit(model: Qwen3_5ForCausalLM, train: torch.Tensor, seconds: float) -> None:
    """Train for `seconds`."""
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    matrices = {name for name, one in named.items() if one.dim() == 2 and "embed" not in name}
    optimizers = [
        torch.optim.Muon(
            [named[name] for name in named if name in matrices],
            lr=MATRICES_RATE,
            weight_decay=0.05,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [named[name] for name in named if name not in matrices], lr=REST_RATE, betas=(0.9, 0.95), weight_decay=0
        ),
    ]
    rates = [MATRICES_RATE, REST_RATE]
    started = time.monotonic()
    losses: list[float] = []
    model.train()
    for step, batch in enumerate(batches(train)):
        spent = (time.monotonic() - started) / seconds
        if spent >= 1:
            break
        factor = min(1, spent / WARM_UP + 0.02) * (1 - spent)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}, {100 * spent:.1f} % of the time: loss {np.mean(losses[-20:]):.3f}", flush=True)
    print(f"{len(losses):,} steps of {BATCH * CONTEXT:,} tokens, loss {np.mean(losses[-20:]):.3f}")


def batches(train: torch.Tensor) -> Iterator[torch.Tensor]:
    """Endless batches (BATCH, CONTEXT + 1): every token once in an order that differs each time, then again."""
    while True:
        first = int(torch.randint(CONTEXT, ()))
        rows = train[first:].unfold(0, CONTEXT + 1, CONTEXT)
        for chosen in torch.randperm(len(rows)).split(BATCH):
            yield rows[chosen]


def loss_of(model: Qwen3_5ForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Nats per token of `batch` (B, T + 1), with products in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch[:, :-1], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(stored: Qwen3_5ForCausalLM, held_out: torch.Tensor) -> float:
    """Nats per token, of windows of CONTEXT."""
    rows = held_out.unfold(0, CONTEXT + 1, CONTEXT)
    return float(np.mean([cross_entropy(stored(row[None, :-1]).logits[0], row[1:]).item() for row in rows]))


@torch.no_grad()
def write_reference(stored: Qwen3_5ForCausalLM, tokenizer: Tokenizer, held_out: torch.Tensor, folder: Path) -> None:
    """The held-out stories as a text, and the logits of the first tokens of them, as `make_fixtures` writes these."""
    text = tokenizer.decode(held_out.tolist(), skip_special_tokens=False)
    stories = text.split(END)[1:]  # the first one is cut
    (folder / "held_out.txt").write_text("\n".join(stories) + "\n", encoding="utf-8")
    ids = torch.tensor([0, *tokenizer.encode(stories[0]).ids, 0, *tokenizer.encode(stories[1]).ids])[:REFERENCE]
    np.savez_compressed(folder / "reference.npz", ids=ids.numpy(), logits=stored(ids[None]).logits[0].numpy())


if __name__ == "__main__":
    main()
