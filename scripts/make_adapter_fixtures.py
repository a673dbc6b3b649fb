"""Makes the adapters (LoRA) of experts in tests/fixtures/adapters: `python -m scripts.make_adapter_fixtures`.

It needs torch, transformers and peft. Each is of the model of its name in tests/fixtures/models, of random numbers.
`reference.npz` next to each holds the ids int64 (T,) of that model's reference, and logits float32 (T, V) of the model
with the adapter, in float32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"


def make(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / "models" / name, dtype=torch.float32)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=3, lora_alpha=9, target_modules=["q_proj"], target_parameters=parameters)
    changed = get_peft_model(model, config)
    with torch.no_grad():
        for label, values in changed.named_parameters():
            if "lora_" in label:
                values.copy_((torch.randn_like(values) * 0.3).half().float())
    folder = FIXTURES / "adapters" / name
    changed.peft_config["default"].base_model_name_or_path = name
    changed.save_pretrained(folder)
    (folder / "README.md").unlink()
    ids = np.load(FIXTURES / "models" / name / "reference.npz")["ids"]
    with torch.no_grad():
        logits = changed.eval()(torch.from_numpy(ids)[None]).logits[0].numpy()
    np.savez_compressed(folder / "reference.npz", ids=ids, logits=logits)


if __name__ == "__main__":
    for each in ("qwen3_moe_normed", "gpt_oss_transposed"):
        make(each)
