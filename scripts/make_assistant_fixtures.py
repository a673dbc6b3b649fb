"""Makes tests/fixtures/assistants with transformers: assistants of the Gemma 4 models of tests, and what they draft.

    reference/bin/python -m scripts.make_assistant_fixtures

`reference.npz` holds ids int64 (T,) and drafts int64 (places, 1 + tokens): how many ids come before, then what the
generator of transformers drafts after one more, in layers with a window from as many tokens as the window has. margins
(places,): by how much the least sure of these tokens was more likely than the next one, in logits.
"""

import json

import numpy as np
import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from scripts.fixtures.reference import FIXTURES, SEED, randomize, stored_model

TARGETS = {"gemma4_shared_kv": {}, "gemma4_values_are_keys": {"use_ordered_embeddings": True}}
OWN = {"hidden_size": 32, "num_hidden_layers": 3, "num_kv_shared_layers": 3, "num_attention_heads": 4}
PLAIN = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False}
KINDS = ["sliding_attention", "full_attention", "full_attention"]
TOKENS, DRAFTED = 70, 4


def make_assistant(name: str, more: dict[str, object]) -> None:
    """Write the assistant of a model in tests/fixtures/models; its centroids choose all tokens."""
    target, folder = stored_model(FIXTURES / "models" / name), FIXTURES / "assistants" / name
    values = json.loads((FIXTURES / "models" / name / "config.json").read_text())
    text = Gemma4TextConfig(**values | OWN | PLAIN | {"layer_types": KINDS})  # the same layers have no window there
    sizes = {"backbone_hidden_size": target.config.hidden_size, "num_centroids": 8, "centroid_intermediate_top_k": 8}
    torch.manual_seed(SEED)
    model = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=text, **sizes, **more))
    randomize(model, 1)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(text.vocab_size))
    model.half().save_pretrained(folder)
    model = Gemma4AssistantForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.num_assistant_tokens = DRAFTED
    ids, drafts = torch.randint(5, text.vocab_size, (1, TOKENS)), []
    margins = list[float]()
    settings = target.generation_config
    settings.max_length = 10 * TOKENS
    for place in range(1, TOKENS):
        with torch.no_grad():
            out = target(ids[:, :place], output_hidden_states=True, return_shared_kv_states=True)
        keys_values = dict(out.shared_kv_states)
        window = keys_values["sliding_attention"]
        keys_values["sliding_attention"] = tuple(one[:, :, -text.sliding_window :] for one in window)
        out.shared_kv_states = keys_values
        generator = SinglePositionMultiTokenCandidateGenerator(model, target.get_input_embeddings(), settings)
        found, logits = generator.get_candidates(ids[:, : place + 1], {}, out, False, 0)
        drafts.append([place, *found[0, place + 1 :].tolist()])
        margins.append(float(-logits[0].topk(2).values.diff().max()))
    np.savez(folder / "reference.npz", ids=ids[0].numpy(), drafts=np.array(drafts), margins=np.array(margins))
    print(f"{name}: {len({tuple(one[1:]) for one in drafts})} drafts of {len(drafts)} differ")


if __name__ == "__main__":
    for name, more in TARGETS.items():
        make_assistant(name, more)
