"""Trains an EAGLE-3 head, which drafts tokens for a model, on texts that the model writes itself.

    pip install torch transformers   # beside polarlm
    python -m scripts.train_eagle3 FOLDER [-m MODEL] [--tokens 150000] [--epochs 3]
    polarlm chat -m MODEL --spec-type eagle3 --spec-draft-model FOLDER

For models of Llama's form. The model makes up a user's messages and answers them; the texts stay in FOLDER, and another
run trains on them. transformers computes the hidden states of the model's layers and its last ones, once. The head
learns the model's distributions of the tokens that it would draft, each from the hidden state that it has made itself
of the row before (Li et al., 2025, arXiv:2503.01840: training-time test). Its vocabulary is the most frequent tokens.

For stories15M, 120,000 tokens took ten minutes to write on 2 cores with other work, one to read, and nine to learn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, log_softmax, rms_norm, silu
from transformers import LlamaConfig, LlamaForCausalLM

from polarlm import Engine, SamplingParams, model_loaders

MARK = "QUESTION"
AT_ONCE, QUESTION, ANSWER = 8, 48, 240  # texts that are written at once, and most tokens of their parts
CONTEXT = 512
DRAFTED, DECAY = 3, 0.8  # tokens of a draft in training, and what each counts of the one before
TOKENS_AT_ONCE, RATE, WARM_UP = 750, 1e-3, 0.05
SEED = 20_261_129
Text = tuple[Tensor, Tensor, Tensor]  # ids (T,), hidden states that the head reads (T, 3E), and the last ones (T, E)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains an EAGLE-3 head on texts of its model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("-m", "--model", help="as for polarlm; without it, the demonstration model")
    parser.add_argument("--tokens", type=int, default=150_000)
    parser.add_argument("--vocabulary", type=int, default=6144, help="tokens that the head can draft")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # two threads on a busy machine wait for each other
    torch.manual_seed(SEED)
    file = options.folder / "texts.json"
    if not file.exists():
        file.write_text(json.dumps(write_texts(options.model, options.tokens)))
    model = load_model(options.model)
    texts = [torch.tensor(ids) for ids in json.loads(file.read_text())]
    counts = torch.bincount(torch.cat(texts), minlength=model.config.vocab_size)
    drafted = counts.argsort(descending=True, stable=True)[: options.vocabulary].sort().values
    print(f"{counts[drafted].sum() / counts.sum():.1%} of the tokens are in the head's vocabulary")
    head = Head(model, drafted)
    fit(head, [*read(model, head.layers, texts)], options.epochs)
    write_head(head, options.folder)


def write_texts(model: str | None, tokens: int) -> list[list[int]]:
    """Conversations of one question, of so many tokens together; of a model without a chat template plain texts."""
    texts, begun = list[list[int]](), time.perf_counter()
    asking = SamplingParams(temperature=1, top_p=0.95, max_tokens=QUESTION, dry_multiplier=0)
    with Engine.load(model, parallel=AT_ONCE, cache_type="f16", ctx_size=CONTEXT) as engine:
        chats: list[Any] = [""] * AT_ONCE
        rendered = engine.detokenize(engine.prompt_ids([{"role": "user", "content": MARK}]), control=True)
        opening = engine.tokenize(rendered.partition(MARK)[0], control=True)
        while (done := sum(map(len, texts))) < tokens:
            if not engine.model.template.is_default:
                questions = engine.generate([opening] * AT_ONCE, asking)
                chats = [[{"role": "user", "content": one.text}] for one in questions]
            is_greedy = len(texts) // AT_ONCE % 2
            answering = SamplingParams(
                temperature=0 if is_greedy and chats[0] else 0.8, max_tokens=ANSWER, dry_multiplier=0, repeat_penalty=1
            )
            for chat, answer in zip(chats, engine.generate(chats, answering), strict=True):
                texts.append([*engine.prompt_ids(chat), *answer.token_ids])
            print(f"{done:,} tokens written, {done / (time.perf_counter() - begun):.0f} a second", flush=True)
    return texts


def load_model(path: str | None) -> LlamaForCausalLM:
    """The model in float32, of transformers."""
    source = model_loaders.load(path, mmproj=model_loaders.NO_VISION_ENCODER)
    config, attention = source.config, source.config.attention
    assert attention.rope is not None
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn.size,
            num_hidden_layers=config.depth,
            num_attention_heads=attention.heads,
            num_key_value_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            rms_norm_eps=config.norm_eps,
            rope_theta=attention.rope.theta,
            tie_word_embeddings=config.tied_head,
        )
    )
    state = model.state_dict()
    for name in source.weights.names():
        values = np.empty(source.weights.shape(name), np.float32)
        source.weights.read_into(name, values)
        state[name].copy_(torch.from_numpy(values))
    source.close()
    return model.eval().requires_grad_(False)


class Head(nn.Module):
    """The head, whose parameters have the names of its file."""

    def __init__(self, model: LlamaForCausalLM, drafted: Tensor) -> None:
        """drafted (its V,): the ids that it can draft."""
        super().__init__()
        config = model.config
        e, f, self.d, depth = config.hidden_size, config.intermediate_size, config.head_dim, config.num_hidden_layers
        self.config, self.drafted, self.table = config, drafted, model.model.embed_tokens.weight
        self.of_model = model.lm_head.weight[drafted]
        self.layers, self.eps = (2, depth // 2, depth - 3), config.rms_norm_eps
        heads, kv_heads = config.num_attention_heads * self.d, config.num_key_value_heads * self.d
        last = model.model.layers[-1]
        self.w = nn.ParameterDict()
        shapes = {"q": (heads, 2 * e), "k": (kv_heads, 2 * e), "v": (kv_heads, 2 * e), "o": (e, heads)}
        for name, shape in shapes.items():
            self._add(f"midlayer.self_attn.{name}_proj", torch.randn(shape) * shape[1] ** -0.5 * 0.5)
        for name in ("gate", "up", "down"):  # a network that reads such states begins better than a random one
            self._add(f"midlayer.mlp.{name}_proj", getattr(last.mlp, f"{name}_proj").weight)
        assert last.mlp.gate_proj.weight.shape == (f, e)
        for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm"):
            self._add(name, torch.ones(e))
        self._add("norm", model.model.norm.weight)
        self._add("fc", torch.cat([torch.zeros(e, 2 * e), torch.eye(e)], dim=1) + torch.randn(e, 3 * e) * 0.01)
        self._add("lm_head", self.of_model)

    def _add(self, name: str, value: Tensor) -> None:
        self.w[name.replace(".", "/") + "/weight"] = nn.Parameter(value.clone())

    def weight(self, name: str) -> Tensor:
        return self.w[name.replace(".", "/") + "/weight"]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weight(name), self.eps)

    def forward(self, ids: Tensor, states: Tensor) -> Iterator[Tensor]:
        """ids (B, T), states (B, T, 3E) → for each token of a draft after the first i + 1 ids, the logits (B, T, its V)
        of row i. A row sees the rows that the model's states give, up to its own, and the earlier ones of its draft."""
        hidden, (b, t) = linear(states, self.weight("fc")), ids.shape
        earlier, seen = list[tuple[Tensor, Tensor]](), torch.ones(t, t, dtype=torch.bool).tril()
        for step in range(DRAFTED):
            token = torch.roll(ids, -1 - step, dims=1)  # the last rows get others, and do not count
            normed = self._norm(hidden, "midlayer.hidden_norm")
            both = torch.cat([self._norm(embedding(token, self.table), "midlayer.input_layernorm"), normed], dim=-1)
            q, k, v = (
                linear(both, self.weight(f"midlayer.self_attn.{side}_proj")).view(b, t, -1, self.d).transpose(1, 2)
                for side in "qkv"
            )
            q, k = self._rotate(q, step), self._rotate(k, step)
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            earlier.append((k, v))
            scores = (q @ earlier[0][0].transpose(2, 3)).masked_fill(~seen, -torch.inf)
            own = [(q * one).sum(-1, keepdim=True) for one, _ in earlier[1:]]
            weights = torch.cat([scores, *own], dim=-1).mul(self.d**-0.5).softmax(dim=-1)
            mixed = weights[..., :t] @ earlier[0][1]
            for at, (_, value) in enumerate(earlier[1:]):
                mixed = mixed + weights[..., t + at, None] * value
            mixed = mixed.transpose(1, 2).reshape(b, t, -1)
            hidden = hidden + linear(mixed, self.weight("midlayer.self_attn.o_proj"))
            y = self._norm(hidden, "midlayer.post_attention_layernorm")
            gate, up, down = (self.weight(f"midlayer.mlp.{one}_proj") for one in ("gate", "up", "down"))
            hidden = hidden + linear(silu(linear(y, gate)) * linear(y, up), down)
            yield linear(self._norm(hidden, "norm"), self.weight("lm_head"))

    def _rotate(self, x: Tensor, step: int) -> Tensor:
        half = self.d // 2
        frequencies = self.config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(x.shape[2]) + step, frequencies)
        cos, sin, left, right = angles.cos(), angles.sin(), x[..., :half], x[..., half:]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


@torch.no_grad()
def read(model: LlamaForCausalLM, layers: Sequence[int], texts: Sequence[Tensor]) -> Iterator[Text]:
    """The states of the texts, in half precision."""
    begun = time.perf_counter()
    for number, ids in enumerate(texts):
        states = model.model(ids[None], output_hidden_states=True).hidden_states
        yield ids, torch.cat([states[layer][0] for layer in layers], dim=-1).half(), states[-1][0].half()
        if number % 100 == 99:
            print(f"{number + 1} of {len(texts)} texts read, {time.perf_counter() - begun:.0f} s", flush=True)


def fit(head: Head, texts: list[Text], epochs: int) -> None:
    """Train the head. The last texts are held out."""
    kept = -(-len(texts) // 20)
    held_out, texts = batches(texts[-kept:], shuffle=False), texts[:-kept]
    optimizer = torch.optim.AdamW(head.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.01)
    steps, step, begun = epochs * len(batches(texts)), 0, time.perf_counter()
    for epoch in range(epochs):
        for batch in batches(texts):
            rate = min((step + 1) / (WARM_UP * steps), (steps - step) / ((1 - WARM_UP) * steps))
            optimizer.param_groups[0]["lr"] = RATE * rate
            losses, _ = losses_of(head, batch)
            optimizer.zero_grad()
            sum(DECAY**at * loss for at, loss in enumerate(losses)).backward()  # type: ignore[union-attr]
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % 20 == 0:
                shown = " ".join(f"{loss.item():.3f}" for loss in losses)
                print(f"step {step} of {steps}: {shown}, {time.perf_counter() - begun:.0f} s", flush=True)
        with torch.no_grad():
            right = torch.stack([losses_of(head, batch)[1] for batch in held_out]).sum(dim=0)
        shares = " ".join(f"{float(share):.1%}" for share in right[0] / right[1])
        print(f"epoch {epoch + 1}: right, held out, after right ones: {shares}", flush=True)


def batches(texts: list[Text], *, shuffle: bool = True) -> list[list[Text]]:
    """Texts of similar lengths together, in random order."""
    by_length = sorted(texts, key=lambda text: len(text[0]))
    found: list[list[Text]] = [[]]
    for text in by_length:
        if found[-1] and len(text[0]) * (len(found[-1]) + 1) > TOKENS_AT_ONCE:
            found.append([])
        found[-1].append(text)
    return [found[at] for at in torch.randperm(len(found))] if shuffle else found


def losses_of(head: Head, batch: list[Text]) -> tuple[list[Tensor], Tensor]:
    """The loss of each token of a draft; and how many were right, and how many there were, both after right ones."""
    ids, states, last = (
        nn.utils.rnn.pad_sequence([text[part] for text in batch], batch_first=True) for part in range(3)
    )
    lengths = torch.tensor([len(text[0]) for text in batch])
    with torch.no_grad():
        wanted = log_softmax(linear(last.float(), head.of_model), dim=-1)
    losses, counts, still = list[Tensor](), list[Tensor](), torch.ones_like(ids, dtype=torch.bool)
    for step, logits in enumerate(head(ids, states.float())):
        target = torch.roll(wanted, -1 - step, dims=1)
        counted = torch.arange(ids.shape[1]) < lengths[:, None] - 2 - step
        cross = -(target.exp() * log_softmax(logits, dim=-1)).sum(dim=-1)
        losses.append(cross[counted].mean())
        still = still & counted
        tried = still.sum()
        still = still & (logits.argmax(dim=-1) == target.argmax(dim=-1))
        counts.append(torch.stack([still.sum(), tried]))
    return losses, torch.stack(counts, dim=1)


def write_head(head: Head, folder: Path) -> None:
    """The head's files, in EAGLE's form."""
    tensors = {name.replace("/", "."): value.detach().bfloat16() for name, value in head.w.items()}
    tensors["d2t"] = head.drafted - torch.arange(len(head.drafted))
    tensors["t2d"] = torch.isin(torch.arange(head.config.vocab_size), head.drafted)
    save_file(tensors, folder / "model.safetensors")
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = {name: getattr(head.config, name) for name in (*names, "rms_norm_eps", "vocab_size")}
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "rope_theta": head.config.rope_parameters["rope_theta"],
        "draft_vocab_size": len(head.drafted),
        "eagle_aux_hidden_state_layer_ids": head.layers,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
