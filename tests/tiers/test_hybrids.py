"""What tiers hold of recurrent layers: the next engine's text is right, however the one that wrote it ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hybrids import MODELS, Load, N, alone, answer, ids_of, loading
from tests.requests.test_forks import PATIENCE
from tests.tiny import forget


@pytest.fixture(params=MODELS)
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Load]:
    (tmp_path / "model").mkdir()
    with loading(tmp_path / "model", request.param) as load:
        yield load


PROMPT = ids_of(9 * N + 6)


def on_disk(folder: Path) -> dict[str, Any]:
    return {"cache_disk": "50M", "cache_disk_folder": str(folder)}


def test_another_engine_goes_on(load: Load, tmp_path: Path) -> None:
    settings = {"kv_store": str(tmp_path / "shared")}
    engine = load(**settings)
    whole = [*PROMPT, *answer(engine, PROMPT).token_ids[:-1]]
    engine.close()
    prompt = [*whole, *ids_of(9, seed=1)]
    result = answer(load(**settings), prompt)
    assert result.usage.cached_from == {"remote": len(whole)}
    assert result.token_ids == alone(load, prompt)


def test_snapshots_that_are_reused_before_they_are_written_are_copied(
    load: Load, tmp_path: Path, may_write: threading.Event
) -> None:
    engine = load(**on_disk(tmp_path))
    whole = [*PROMPT, *answer(engine, PROMPT).token_ids[:-1]]
    forget(engine)
    may_write.set()
    assert engine._tiers._writer.flush(PATIENCE)
    prompt = [*whole, *ids_of(9, seed=1)]
    result = answer(engine, prompt)
    assert result.usage.cached_from == {"disk": len(whole)}
    assert result.token_ids == alone(load, prompt)


@pytest.mark.parametrize("fault", ["changed", "another place's"])
def test_a_snapshot_that_cannot_be_used_costs_the_tokens_since_the_one_before_it(
    load: Load, tmp_path: Path, fault: str
) -> None:
    """Though the keys and values beside it are whole."""
    prompt = [*PROMPT[: 9 * N], *ids_of(20, seed=1)]
    wanted = alone(load, prompt)
    for faulty, cached in (([8], 5 * N), ([4, 8], 0)):  # numbers of blocks with a snapshot at their end
        folder = tmp_path / str(cached)
        engine = load(**on_disk(folder))
        answer(engine, PROMPT, tokens=2)
        _, hashes = engine._prefixes.hashes(PROMPT)
        names = engine._tiers._wait_for_names()
        engine.close()
        files = [folder / names.state(key).hex() for key in hashes]
        assert [number for number, file in enumerate(files) if file.exists()] == [4, 8]
        contents = {number: bytearray(files[number].read_bytes()) for number in (4, 8)}
        for number in faulty:
            content = contents[number]
            if fault == "another place's":
                files[number].write_bytes(contents[12 - number])
            else:
                content[len(content) // 2] ^= 0x10
                files[number].write_bytes(content)
        result = answer(load(**on_disk(folder)), prompt)
        assert result.usage.cached_tokens == cached
        assert result.token_ids == wanted
