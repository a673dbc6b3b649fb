"""Trains the small hybrid under tests/fixtures/trained_hybrid with transformers, on a text of short stories.

    python -m venv reference && reference/bin/pip install torch transformers
    reference/bin/python scripts/train_hybrid.py stories.txt FOLDER [--minutes 60]
    reference/bin/python scripts/train_hybrid.py --mtp FOLDER [--minutes 20]

Random weights say little about what a coded state costs: theirs holds nothing that a later token needs. This model has
the layers of Qwen3.5, three gated delta rules to one of attention, with key and value heads of its sizes (128 × 128),
and 3.5 million parameters in all, so that an hour of one core teaches it to tell a story.

The file has stories that are separated by lines of `<|endoftext|>`. The last ones are held out, and the model's
perplexity on them is printed. FOLDER gets a tokenizer, the weights as bfloat16, the held-out stories and the logits of
some of their tokens (`reference.npz`, as `make_fixtures.py` describes it).

With --mtp, the model in FOLDER gets a layer that predicts several tokens, as Qwen3.5's files have it (`mtp.*`). It
learns the model's distributions, on texts that the model has written itself; the model stays as it is. The drafts that
it makes after some tokens of the reference are added to that file, computed here by transformers' layer.

Matrices are trained with Muon (Jordan et al., 2024), the rest with AdamW. The learning rate falls to 0 at the end of
the time, so a machine that does more steps gives a better model, and no two runs give the same one.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.masking_utils import create_causal_mask
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

END = "<|endoftext|>"
VOCABULARY, CONTEXT, BATCH = 1024, 512, 8
HELD_OUT = 40_000  # tokens
REFERENCE = 160  # tokens whose logits are kept
WRITTEN, AT_ONCE = 300_000, 64  # tokens that the model writes for `Mtp`; texts that it writes at a time
DRAFTED = 3  # tokens of a draft of the reference
MARGIN = 0.1  # nats by which each of its tokens is more likely than the next one
MATRICES_RATE, REST_RATE, WARM_UP = 5e-3, 3e-3, 0.03
SEED = 20_261_124


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small hybrid on stories.")
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--mtp", action="store_true", help="train the layer that predicts several tokens")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.mtp:
        add_mtp(options.folder, options.minutes * 60)
        return

    stories = [story.strip() for story in options.text.read_text(encoding="utf-8").split(END)]
    tokenizer = train_tokenizer(stories)
    write_tokenizer(tokenizer, options.folder)
    ids = np.concatenate([[0, *one.ids] for one in tokenizer.encode_batch([story for story in stories if story])])
    train, held_out = torch.from_numpy(ids[:-HELD_OUT]), torch.from_numpy(ids[-HELD_OUT:])
    print(f"{len(train):,} tokens to train on, {len(stories):,} stories, {sum(map(len, stories)):,} characters")
    model = new_model()
    print(f"{sum(one.numel() for one in model.parameters()):,} parameters")
    fit(model, train, options.minutes * 60, loss_of)
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


def fit(
    model: nn.Module,
    train: torch.Tensor,
    seconds: float,
    loss_of: Callable[[Any, torch.Tensor], torch.Tensor],
) -> None:
    """Train for `seconds`. loss_of: as the function of this name."""
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


class Mtp(nn.Module):
    """The layer that predicts several tokens, of a model that is not trained any more."""

    def __init__(self, model: Qwen3_5ForCausalLM) -> None:
        super().__init__()
        config, size = model.config, model.config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        nn.init.normal_(self.fc.weight, std=config.initializer_range)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))])
        for one in self.layers.parameters():
            if one.dim() == 2:
                nn.init.normal_(one, std=config.initializer_range)
        self.norm, self.pre_fc_norm_hidden, self.pre_fc_norm_embedding = (
            Qwen3_5RMSNorm(size, config.rms_norm_eps) for _ in range(3)
        )
        self._model = [model.requires_grad_(False).eval()]  # in a list: its parameters are not these

    def forward(self, ids: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Ids (B, T) and the hidden states before them (B, T, E) → hidden states (B, T, E), for the model's head."""
        (model,) = self._model
        embedded = model.model.embed_tokens(ids)
        both = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(before)], -1)
        x, places = self.fc(both), torch.arange(ids.shape[1])[None]
        mask = create_causal_mask(model.config, x, None, None, places)
        rope = model.model.rotary_emb(x, places)
        x = self.layers[0](x, position_embeddings=rope, attention_mask=mask, position_ids=places)
        return self.norm(x)

    def states(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids (B, T) → hidden states of the model (B, T, E), as its head gets them, and of the tokens before: zeros
        before the first."""
        with torch.no_grad():
            hidden = self._model[0].model(ids, use_cache=False).last_hidden_state
        return hidden, torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model[0].lm_head(hidden)


def mtp_loss(mtp: Mtp, batch: torch.Tensor) -> torch.Tensor:
    """Nats per token of `batch` (B, T + 1) by which the layer's distributions differ from the model's."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden, before = mtp.states(batch[:, :-1])
        wanted, guessed = mtp.logits(hidden), mtp.logits(mtp(batch[:, :-1], before))
    both = (log_softmax(x.float().flatten(0, 1), -1) for x in (guessed, wanted))
    return kl_div(*both, reduction="batchmean", log_target=True)


def add_mtp(folder: Path, seconds: float) -> None:
    """Train the layer for `seconds`, and add it to the files of the model in `folder`."""
    model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mtp = Mtp(model)
    fit(mtp, written(model), seconds, mtp_loss)
    mtp.bfloat16().float().eval()
    tensors = {
        name: one for name, one in load_file(folder / "model.safetensors").items() if not name.startswith("mtp.")
    }
    tensors |= {f"mtp.{name}": one.bfloat16() for name, one in mtp.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    reference = dict(np.load(folder / "reference.npz"))
    drafts = mtp_drafts(mtp, torch.from_numpy(reference["ids"])[None])
    np.savez_compressed(folder / "reference.npz", **(reference | {"drafts": drafts}))


@torch.no_grad()
def written(model: Qwen3_5ForCausalLM) -> torch.Tensor:
    """Texts that the model writes, one after another, (WRITTEN,) or a few more."""
    model.generation_config.eos_token_id = None
    start, texts = torch.zeros((AT_ONCE, 1), dtype=torch.int64), list[torch.Tensor]()
    while sum(one.numel() for one in texts) < WRITTEN:
        texts.append(model.generate(start, do_sample=True, top_k=0, max_new_tokens=CONTEXT, pad_token_id=0))
    return torch.cat([one.flatten() for one in texts])


@torch.no_grad()
def mtp_drafts(mtp: Mtp, ids: torch.Tensor) -> np.ndarray:
    """The tokens that the layer drafts after the token at some places of ids (1, T), each the most likely one: int64
    (places, 1 + DRAFTED), the place and the tokens."""
    drafts, (_, before) = [], mtp.states(ids)
    for place in range(1, ids.shape[1]):
        now, states, tokens = ids[:, : place + 1], before[:, : place + 1], list[int]()
        while len(tokens) < DRAFTED:
            hidden = mtp(now, states)[:, -1:]
            (best, second), order = mtp.logits(hidden)[0, 0].topk(2)
            if best - second < MARGIN:
                break
            tokens.append(int(order[0]))
            now, states = torch.cat([now, order[None, :1]], 1), torch.cat([states, hidden], 1)
        drafts += [[place, *tokens]] if len(tokens) == DRAFTED else []
    return np.array(drafts)


if __name__ == "__main__":
    main()
