"""Makes the tiny embedding models of the tests with transformers, the reference: encoders under
tests/fixtures/encoders, decoders under tests/fixtures/embedding_decoders, and rerankers under tests/fixtures/rerankers.

    python -m venv reference && reference/bin/pip install torch transformers sentence-transformers
    reference/bin/python -m scripts.make_encoder_fixtures [FOLDER/NAME ...]

A model is described by its config.json there, and has random weights. `reference.npz` next to each holds, for each of a
few texts, ids{i} int64 (T,) and states{i} float32 (T, E), the last hidden states, computed by transformers in float32
from the weights as stored. A model with modules of sentence-transformers has vector{i} float32 (E,) as well, what the
modules make of the states. A reranker has, for each pair of texts, ids{i}, types{i} int64 (T,), and score{i} float32
(1,), its logit, instead of states.
"""

import json
import sys
from pathlib import Path

import numpy as np
import sentence_transformers
import torch
import transformers
from tokenizers import Tokenizer, models

from scripts.fixtures.reference import FIXTURES, write_random

SEED = 20_261_124
VOCABULARY = 96
LENGTHS = (1, 2, 17, 64)  # tokens of a text; the longest is the whole context of some models
PAIRS = ((1, 1), (3, 14), (20, 44))  # tokens of the two texts of a pair
PROMPTS = {"query": "the sea: ", "document": "a ship: "}
WITH_MODULES, AS_PUBLISHED = "embedding_gemma", "nomic_bert"


def randomize(model: torch.nn.Module) -> None:
    """Random weights. Queries and keys are larger, so that attention is selective."""
    for name, parameter in model.named_parameters():
        if "norm" in name.lower():
            parameter.data = (0.0 if name.endswith("bias") else 1.0) + 0.2 * torch.randn_like(parameter)
        elif name.endswith("bias"):
            parameter.data = 0.3 * torch.randn_like(parameter)
        elif "embeddings" in name:
            parameter.data = torch.randn_like(parameter)
        else:
            selective = any(part in name for part in ("query", "key", "q_proj", "k_proj"))
            parameter.data = (1.6 if selective else 1.0) * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5


def make_model(folder: Path) -> None:
    kind = transformers.AutoModel
    config = save_random(folder, kind)
    stored = kind.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager").eval()
    with_modules = add_modules(folder, config.hidden_size) if folder.name == WITH_MODULES else None
    generator, arrays = torch.Generator().manual_seed(SEED), {}
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(2, config.vocab_size, (1, length), generator=generator)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            states = stored(**inputs).last_hidden_state[0]
            if with_modules is not None:
                arrays[f"vector{number}"] = with_modules(inputs)["sentence_embedding"][0].numpy()
        arrays |= {f"ids{number}": ids[0].numpy(), f"states{number}": states.numpy()}
    np.savez(folder / "reference.npz", **arrays)
    print(f"{folder.name}: states up to {np.abs(states.numpy()).max():.1f}")


def save_random(folder: Path, kind: type) -> transformers.PretrainedConfig:
    """Saves random weights for the configuration in a folder, and returns it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if folder.name == AS_PUBLISHED:  # whose keys transformers does not read
        config = transformers.AutoConfig.from_pretrained(folder.with_name(f"{AS_PUBLISHED}_new"))
        config.rope_parameters["rope_theta"] = json.loads((folder / "config.json").read_text())["rotary_emb_base"]
    write_random(folder, kind, config, randomize, SEED)
    return config


def add_modules(folder: Path, size: int) -> sentence_transformers.SentenceTransformer:
    """Writes the modules of EmbeddingGemma next to a model: mean pooling, two dense ones, normalization. Returns all
    as sentence-transformers computes them from the stored values."""
    from sentence_transformers import models as modules

    vocabulary = {"<pad>": 0, **{f"t{i}": i for i in range(1, VOCABULARY)}}
    library = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=library, pad_token="<pad>")
    words.save_pretrained(folder)  # which the library asks for
    dense = [
        modules.Dense(rows, columns, bias=False, activation_function=torch.nn.Identity())
        for rows, columns in ((size, 2 * size), (2 * size, size))
    ]
    for module in dense:
        randomize(module)
    arguments = {"torch_dtype": torch.float32, "attn_implementation": "eager"}
    made = sentence_transformers.SentenceTransformer(
        modules=[
            modules.Transformer(str(folder), model_args=arguments),
            modules.Pooling(size, pooling_mode="mean"),
            *dense,
            modules.Normalize(),
        ],
        prompts=PROMPTS,
        device="cpu",
    )
    config, weights = (folder / "config.json").read_text(), (folder / "model.safetensors").read_bytes()
    made.save(str(folder), create_model_card=False)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(weights)
    for path in folder.glob("*token*"):
        path.unlink()
    return made.eval()


def make_reranker(folder: Path) -> None:
    kind = transformers.AutoModelForSequenceClassification
    config = save_random(folder, kind)
    stored = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    generator, arrays = torch.Generator().manual_seed(SEED), {}
    for number, (first, second) in enumerate(PAIRS):
        ids = torch.randint(2, config.vocab_size, (1, first + second), generator=generator)
        kinds = getattr(config, "type_vocab_size", 1)
        types = torch.tensor([[0] * first + [kinds - 1] * second])
        further = {"token_type_ids": types} if hasattr(config, "type_vocab_size") else {}
        with torch.no_grad():
            score = stored(ids, attention_mask=torch.ones_like(ids), **further).logits[0]
        arrays |= {f"ids{number}": ids[0].numpy(), f"types{number}": types[0].numpy(), f"score{number}": score.numpy()}
    np.savez(folder / "reference.npz", **arrays)
    print(f"{folder.name}: scores {[round(float(arrays[f'score{number}'][0]), 3) for number in range(len(PAIRS))]}")


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    for kind in ("encoders", "embedding_decoders", "rerankers"):
        for folder in sorted((FIXTURES / kind).iterdir()):
            if not sys.argv[1:] or f"{kind}/{folder.name}" in sys.argv[1:]:
                (make_reranker if kind == "rerankers" else make_model)(folder)
