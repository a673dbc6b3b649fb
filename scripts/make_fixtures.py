"""Makes the weights of the tiny models under tests/fixtures/models with transformers, the reference of the tests.

    python -m venv reference && reference/bin/pip install torch transformers
    reference/bin/python -m scripts.make_fixtures [NAME ...]

A model is described by its config.json there. With names, it makes these models alone; without, all of them and
`rope.json`. Both bring `greedy.json` up to date.
Every model has random weights, scaled so that logits spread over a few units and the order of the tokens matters.
`reference.npz` next to each holds ids int64 (T,), logits float32 (T, V), inv_freq float32 (D/2,) and the scalar
attention_factor, and where there are two kinds of RoPE local_inv_freq or short_inv_freq, all computed by transformers
in float32 from the files as they were stored. `rope.json` holds frequencies of realistic RoPE settings.
`greedy.json` holds a prompt and its most likely continuation for some models, and of the step where it is closest the
margin of the token over the next one, and the most that a logit changes when keys and values are rounded, as a store
rounds them.
"""

import sys

import transformers

from scripts.fixtures.greedy import make_greedy_runs
from scripts.fixtures.reference import FIXTURES, make_model
from scripts.fixtures.ropes import make_ropes

if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    names = sys.argv[1:] or sorted(folder.name for folder in (FIXTURES / "models").iterdir())
    for name in names:
        make_model(name)
    make_greedy_runs(names)
    if not sys.argv[1:]:
        make_ropes()
