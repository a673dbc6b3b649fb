"""Makes the tiny embedding models of the tests with transformers, the reference: encoders under
tests/fixtures/encoders, and decoders under tests/fixtures/embedding_decoders.

    python -m venv reference && reference/bin/pip install torch transformers
    reference/bin/python scripts/make_encoder_fixtures.py [NAME ...]

Every model has random weights. `reference.npz` next to each holds, for each of a few texts, ids{i} int64 (T,) and
states{i} float32 (T, E), the last hidden states, computed by transformers in float32 from the weights as stored.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
SEED = 20_261_124
LENGTHS = (1, 2, 17, 64)  # of texts; the longest is the whole context of some models
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
DECODERS = {  # as MODELS
    "qwen3_embedding": (
        "qwen3",
        "bfloat16",
        {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": True},
    ),
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
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(SEED)
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **changes})
    model = transformers.AutoModel.from_config(config)
    randomize(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    stored = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if name == "nomic_bert":
        spell_as_published(folder)
    generator, found = torch.Generator().manual_seed(SEED), {}
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(2, config.vocab_size, (1, length), generator=generator)
        with torch.no_grad():
            states = stored(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        found |= {f"ids{number}": ids[0].numpy(), f"states{number}": states.numpy()}
    np.savez(folder / "reference.npz", **found)
    print(f"{name}: states up to {np.abs(states.numpy()).max():.1f}")


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    for name in sys.argv[1:] or MODELS | DECODERS:
        make_model(name, *(MODELS | DECODERS)[name])
