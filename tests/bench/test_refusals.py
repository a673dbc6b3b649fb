"""What a measurement cannot do is told in one sentence, before anything is printed or written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from polarlm.bench.gpu import __main__ as gpu
from polarlm.bench.quality import __main__ as quality
from polarlm.bench.quality import kld_file
from polarlm.bench.serving import __main__ as serving
from polarlm.bench.speed import __main__ as speed
from tests.bench.test_cost import MINE
from tests.bench.test_gpu import SIZES, emulated
from tests.conftest import TRAINED_HYBRID
from tests.ports import free_port
from tests.random_model import random_model
from tests.tiny import VOCABULARY, make_model

ALWAYS: dict[str, tuple[Callable[..., int | None], str]] = {  # the functions of commands, and words that each has
    "quality": (quality.main, "--model tiny --device cpu -o out.html"),
    "kld": (quality.main, "--model tiny --device cpu"),
    "state": (quality.main, "--state --threads 1 -o out.html"),
    "gpu": (partial(gpu.main, gpu=emulated(), sizes=SIZES), "--contexts 64 --output out.json"),
    "serving": (serving.main, ""),
    "speed": (speed.main, "--weights random-Q8_0.gguf --output out.json --device cpu --prompt 40 --depth 100"),
    "section": (speed.main, "--output out.json"),
}
# Further words, and what they are told.
REFUSED = """
quality: none.txt => TEXT: none.txt cannot be read: No such file or directory
quality: latin1.txt => TEXT: latin1.txt is not UTF-8 text
quality: text.txt --minutes nan => --minutes: must be above 0
quality: text.txt --window 512 => --window 512 is more than the 256 tokens of context
quality: text.txt --ablate polarquant:plain => --ablate polarquant:plain: give a type without :plain
quality: text.txt --types q8_0 => --types q8_0: Cache type q8_0 needs a head dimension
quality: text.txt --codec none.py => --codec none.py is no codec (FileNotFoundError
quality: text.txt --codec taken.py => --codec taken.py: 'ring3': there is such a cache type already
quality: text.txt --codec text.txt => its name does not end with .py
quality:  => TEXT is missing: give a UTF-8 text like what the model will read; figures of
kld: --kld-base none.kld => none.kld cannot be read: No such file or directory
kld: --kld-base other.kld => --kld-base other.kld is of a model with 5 tokens in its vocabulary, and tiny
kld: --kld-base long.kld => --kld-base long.kld has windows of 514 tokens, and tiny
kld: text.txt --kld-base other.kld => --kld-base other.kld exists
kld: text.txt --kld-base none/out.kld => --kld-base none/out.kld cannot be written: No such file
kld: text.txt --kld-base out.kld --types f16 => leave --types and --output out
kld: short.txt --kld-base out.kld => TEXT has 6 tokens, and at least 64 are needed
state: text.txt --model tiny => has no recurrent layers whose snapshots could be coded; without --state
state: text.txt --model hybrid => --state needs 512 tokens of context, and
state: text.txt --model {trained} => TEXT has fewer than 512 tokens: give a longer text
state: text.txt --model {trained} --types balanced => leave --types out
gpu: --types int3 => --types int3: There is no cache type 'int3'
gpu: --contexts 63 => --contexts takes numbers from 64 up, separated by commas, not '63'
gpu: --batches 0 => --batches takes numbers from 1 up, separated by commas, not '0'
gpu: --only steps => 'steps' is not among prompts, rates, sequences, server, kernels
gpu: --output none/out.json => --output none/out.json cannot be written
serving: --url http://127.0.0.1:{port} => --url http://127.0.0.1:{port}: no such server answers there
serving: --url http://a --weights b => --url and --weights or -hf both say which server it is
serving: --only agents --peer a=http://b => --peer and --only agents, which starts its own servers
serving: --peer vllm=python => --peer vllm=python: give xllamacpp=PYTHON, a Python that has it, or NAME=URL
serving: --url http://a --peer xllamacpp=python => --url and a --peer that is started
serving: --rate 0 => --rate: must be more than 0
serving: --only agents --agents 0 => --agents: must be at least 1
serving: --only agents --url http://a => --url and --only agents, which starts its own servers
serving: --only pressure --times 2,x => --times must be numbers above 0 such as 2,4,8, not '2,x'
speed: --types int3 => --types int3: There is no cache type 'int3'
speed: --peer-types f16,q5_0 => f16,q5_0: 'q5_0' is not among f16, q8_0, q4_0; none leaves all
speed: --peer vllm => --peer vllm: 'vllm' is not among llama-cpp-python, ik_llama.cpp, openvino-genai, xlla
speed: --threads two => --threads takes numbers from 1 up, separated by commas, not 'two'
speed: --prompt 5000 => --prompt: the model's context of 512 tokens is too short for a prompt of 5,000
section: --only embeddings => --weights names no .gguf file of an encoder
section: --only embeddings -m x --peer xllamacpp => are compared with llama-cpp-python
section: --only drafts --threads 1,2 => --threads 1,2: --only drafts takes one number
section: --parts --threads 1,2 => --threads 1,2: --parts takes one number
section: --parts --only drafts => --parts and --only drafts both say what alone is measured; leave one of them out
section: --only experts -m mixture --expert-cache 1K => --expert-cache 1K has room for 0 of the 4
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, which has small models and files of all kinds."""
    folder = tmp_path_factory.mktemp("place")
    models = {"tiny": "llama_gqa_linear", "hybrid": "qwen3_5_tied", "mixture": "mixtral_window"}
    for name, fixture in models.items():
        (folder / name).mkdir()
        make_model(folder / name, fixture)
    random_model(folder)
    (folder / "text.txt").write_text("Once upon a time there was a cat.\n" * 20, encoding="utf-8")
    (folder / "short.txt").write_text("a house", encoding="utf-8")
    (folder / "latin1.txt").write_bytes(b"caf\xe9" * 99)
    (folder / "taken.py").write_text(MINE.replace("mine3", "ring3"))
    for name, tokens, vocabulary in (("other.kld", 4, 5), ("long.kld", 514, VOCABULARY)):
        with kld_file.KldWriter(folder / name, vocabulary, [[0] * tokens]) as writer:
            writer.add(np.zeros((tokens - 1 - tokens // 2, vocabulary), np.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def files(place: Path) -> set[str]:
    """Names there, but for the folder that Python makes when it compiles a module."""
    return {path.name for path in place.iterdir()} - {"__pycache__"}


@pytest.mark.parametrize("command", ALWAYS)
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    place: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (main, always), before = ALWAYS[command], files(place)
    rows = re.findall(rf"(?m)^{command}: (.*)=> (.*)$", REFUSED.format(port=free_port(), trained=TRAINED_HYBRID))
    assert rows
    for words, sentence in rows:
        assert main([*always.split(), *words.split()]) == 2, words
        printed = capsys.readouterr()
        assert printed.out == "", words
        told = printed.err.splitlines()[-1]
        assert (told[:7], sentence in told, "Traceback" in printed.err) == ("error: ", True, False), printed.err
    assert files(place) == before
