"""Makes the tiny embedding models of the tests with transformers, the reference: encoders under
tests/fixtures/encoders, decoders under tests/fixtures/embedding_decoders, and rerankers under tests/fixtures/rerankers.

    python -m venv reference && reference/bin/pip install torch transformers sentence-transformers
    reference/bin/python scripts/make_encoder_fixtures.py [NAME ...]

Every model has random weights. `reference.npz` next to each holds, for each of a few texts, ids{i} int64 (T,) and
states{i} float32 (T, E), the last hidden states, computed by transformers in float32 from the weights as stored. A
model with modules of sentence-transformers has vector{i} float32 (E,) as well, what they make of the states. A reranker
has, for each pair of texts, ids{i}, types{i} int64 (T,), and score{i} float32 (1,), its logit, in the place of states.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import sentence_transformers
import torch
import transformers
from tokenizers import Tokenizer, models

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
SEED = 20_261_124
LENGTHS = (1, 2, 17, 64)  # of texts; the longest is the whole context of some models
PAIRS = ((1, 1), (3, 14), (20, 44))  # tokens of the two texts of a pair
COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}

# name: (model type, type of the stored weights, changes to COMMON)
MODELS = {
    "bert_f32": ("bert", "float32", {}),
    "bert_wide": ("bert", "float16", {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}),
    "xlm_roberta": (
        "xlm-roberta",
        "bfloat16",
        {"max_position_embeddings": 66, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1},
    ),
    "nomic_bert_new": ("nomic_bert", "float32", {"hidden_size": 64, "rope_parameters": {"rope_theta": 700.0}}),
    "nomic_bert": ("nomic_bert", "float32", {"hidden_size": 64, "rope_parameters": {"rope_theta": 500.0}}),
}
# With modules of sentence-transformers. A window is so short that most texts are longer.
WITH_MODULES = {
    "embedding_gemma": (
        "gemma3_text",
        "bfloat16",
        {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "use_bidirectional_attention": True,
            "rms_norm_eps": 1e-6,
        },
    ),
}
PROMPTS = {"query": "the sea: ", "document": "a ship: "}
DECODERS = {  # as MODELS
    "qwen3_embedding": (
        "qwen3",
        "bfloat16",
        {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": True},
    ),
}
RERANKERS = {  # as MODELS
    "bert": ("bert", "float32", {"num_labels": 1}),
    "xlm_roberta": ("xlm-roberta", "float16", {**MODELS["xlm_roberta"][2], "num_labels": 1}),
}
NOMIC_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}
NOMIC_VALUES = {
    "rotary_emb_base": 500.0,
    "activation_function": "swiglu",
    "prenorm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_scaling_factor": None,
    "max_trained_positions": 2048,
}


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


def spell_as_published(folder: Path) -> None:
    """Rewrites the config.json of a NomicBertModel as its authors' files have it; tensors have their names already."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, theirs in NOMIC_KEYS.items():
        config[theirs] = config.pop(key)
    config.pop("rope_parameters", None)
    path.write_text(json.dumps(config | NOMIC_VALUES, indent=2) + "\n")


def make_model(name: str, model_type: str, dtype: str, changes: dict) -> None:
    folder = FIXTURES / ("embedding_decoders" if name in DECODERS else "encoders") / name
    config = save_random(folder, model_type, dtype, changes, transformers.AutoModel)
    stored = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with_modules = add_modules(folder, config.hidden_size) if name in WITH_MODULES else None
    if name == "nomic_bert":
        spell_as_published(folder)
    generator, found = torch.Generator().manual_seed(SEED), {}
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(2, config.vocab_size, (1, length), generator=generator)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            states = stored(**given).last_hidden_state[0]
            if with_modules is not None:
                found[f"vector{number}"] = with_modules(given)["sentence_embedding"][0].numpy()
        found |= {f"ids{number}": ids[0].numpy(), f"states{number}": states.numpy()}
    np.savez(folder / "reference.npz", **found)
    print(f"{name}: states up to {np.abs(states.numpy()).max():.1f}")


def save_random(folder: Path, model_type: str, dtype: str, changes: dict, kind: type) -> transformers.PretrainedConfig:
    """Saves a model with random weights in a new folder, and returns its configuration."""
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(SEED)
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **changes})
    model = kind.from_config(config)
    randomize(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return config


def add_modules(folder: Path, size: int) -> sentence_transformers.SentenceTransformer:
    """Writes the modules of EmbeddingGemma next to a model: mean pooling, two dense ones, normalization. Returns all
    as sentence-transformers computes them from the stored values."""
    from sentence_transformers import models as modules

    vocabulary = {"<pad>": 0, **{f"t{i}": i for i in range(1, COMMON["vocab_size"])}}
    library = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=library, pad_token="<pad>")
    words.save_pretrained(folder)  # which the library asks for
    dense = [
        modules.Dense(rows, columns, bias=False, activation_function=torch.nn.Identity())
        for rows, columns in ((size, 2 * size), (2 * size, size))
    ]
    for module in dense:
        randomize(module)
    own = {"torch_dtype": torch.float32, "attn_implementation": "eager"}
    made = sentence_transformers.SentenceTransformer(
        modules=[
            modules.Transformer(str(folder), model_args=own),
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


def make_reranker(name: str, model_type: str, dtype: str, changes: dict) -> None:
    folder, kind = FIXTURES / "rerankers" / name, transformers.AutoModelForSequenceClassification
    config = save_random(folder, model_type, dtype, changes, kind)
    stored = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    generator, found = torch.Generator().manual_seed(SEED), {}
    for number, (first, second) in enumerate(PAIRS):
        ids = torch.randint(2, config.vocab_size, (1, first + second), generator=generator)
        types = torch.tensor([[0] * first + [config.type_vocab_size - 1] * second])
        with torch.no_grad():
            score = stored(ids, attention_mask=torch.ones_like(ids), token_type_ids=types).logits[0]
        found |= {f"ids{number}": ids[0].numpy(), f"types{number}": types[0].numpy(), f"score{number}": score.numpy()}
    np.savez(folder / "reference.npz", **found)
    print(f"{name}: scores {[round(float(found[f'score{number}'][0]), 3) for number in range(len(PAIRS))]}")


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    of_states = MODELS | WITH_MODULES | DECODERS
    for name in sys.argv[1:] or of_states:
        make_model(name, *of_states[name])
    for name in () if sys.argv[1:] else RERANKERS:
        make_reranker(name, *RERANKERS[name])
