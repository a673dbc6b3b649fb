"""What a measurement cannot do is told in one sentence, before anything is printed or written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from polarlm.bench.lab import kld, load
from polarlm.bench.lab.gpu import __main__ as gpu
from polarlm.bench.quality import __main__ as quality
from polarlm.bench.speed import __main__ as speed
from tests.bench.test_cost import MINE
from tests.bench.test_gpu import SIZES, emulated
from tests.ports import free_port
from tests.random_model import random_model
from tests.tiny import VOCABULARY, make_model

ALWAYS: dict[str, tuple[Callable[..., int | None], str]] = {  # the functions of commands, and words that each has
    "quality": (quality.main, "--model tiny --device cpu -o out.html"),
    "kld": (kld.main, "--model tiny -o out.html"),
    "gpu": (partial(gpu.main, gpu=emulated(), sizes=SIZES), "--contexts 64 --output out.json"),
    "load": (load.main, ""),
    "speed": (speed.main, "--weights random-Q8_0.gguf --output out.json --device cpu --prompt 40 --depth 100"),
}
WRONG = f"""{MINE}

def spoiled(name, options, make=create):
    codec = make(name, options)
    codec.__dict__["sizes"] = lambda fields: (3, 4)
    return codec


create = spoiled
"""
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
quality: text.txt --codec wrong.py --types mine3 => 'mine3': sizes says (3, 4) of blocks with 64 vectors of 128
quality: text.txt --codec text.txt => its name does not end with .py
quality:  => TEXT is missing: give a UTF-8 text like what the model will read; figures of
quality: --kld-base a.kld => --kld-base has a command of its own, in a checkout: python -m polarlm.bench.lab.kld
kld: none.kld => none.kld cannot be read: No such file or directory
kld: other.kld => other.kld is of a model with 5 tokens in its vocabulary, and tiny
kld: long.kld => long.kld has windows of 514 tokens, and tiny
gpu: --types int3 => --types int3: There is no cache type 'int3'
gpu: --contexts 63 => --contexts takes numbers from 64 up, separated by commas, not '63'
gpu: --batches 0 => --batches takes numbers from 1 up, separated by commas, not '0'
gpu: --only steps => 'steps' is not among prompts, rates, sequences, server, kernels
gpu: --output none/out.json => --output none/out.json cannot be written
load: --url http://127.0.0.1:{port} => --url http://127.0.0.1:{port}: no such server answers there
load: --url http://a --weights b => --url and --weights or -hf both say which server it is
load: --peer vllm=python => --peer vllm=python: give NAME=URL of a server that runs
load: --rate 0 => --rate: must be more than 0
speed: --types int3 => --types int3: There is no cache type 'int3'
speed: --parts => --parts has a command of its own, in a checkout: python -m polarlm.bench.lab.parts
speed: --only starts => --only: invalid choice: 'starts'
speed: --peer-types f16,q5_0 => f16,q5_0: 'q5_0' is not among f16, q8_0, q4_0; none leaves all
speed: --peer vllm => --peer vllm: 'vllm' is not among llama-cpp-python, openvino-genai
speed: --session 2 => --device: the servers of a session have their defaults; leave it out
speed: --threads two => --threads takes numbers from 1 up, separated by commas, not 'two'
speed: --prompt 5000 => --prompt: the model's context of 512 tokens is too short for a prompt of 5,000
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, which has small models and files of all kinds."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "tiny").mkdir()
    make_model(folder / "tiny", "llama_gqa_linear")
    random_model(folder)
    (folder / "text.txt").write_text("Once upon a time there was a cat.\n" * 20, encoding="utf-8")
    (folder / "latin1.txt").write_bytes(b"caf\xe9" * 99)
    (folder / "taken.py").write_text(MINE.replace("mine3", "ring3"))
    (folder / "wrong.py").write_text(WRONG)
    for name, tokens, vocabulary in (("other.kld", 4, 5), ("long.kld", 514, VOCABULARY)):
        head = b"_logits_" + np.array([tokens, vocabulary, 1], "<i4").tobytes()
        (folder / name).write_bytes(head.ljust(kld.nbytes(1, tokens, vocabulary), b"\0"))
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
    rows = re.findall(rf"(?m)^{command}: (.*)=> (.*)$", REFUSED.format(port=free_port()))
    assert rows
    for words, sentence in rows:
        assert main([*always.split(), *words.split()]) == 2, words
        printed = capsys.readouterr()
        assert printed.out == "", words
        told = printed.err.splitlines()[-1]
        assert (told[:7], sentence in told, "Traceback" in printed.err) == ("error: ", True, False), printed.err
    assert files(place) == before
