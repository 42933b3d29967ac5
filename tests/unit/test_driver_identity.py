"""Identities of inputs: what is a change and what is none, and how much is read to know it."""

import os
from itertools import pairwise
from pathlib import Path

import pytest

from slipstream.backend.driver.start import identity as identities
from slipstream.backend.driver.start.identity import BLOCK, SAMPLES, WEIGHT_SAMPLES, identify


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """Offsets of the blocks that are read."""
    offsets: list[int] = []
    block = identities._block

    def recording(file, offset: int) -> bytes:
        offsets.append(offset)
        return block(file, offset)

    monkeypatch.setattr(identities, "_block", recording)
    return offsets


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_a_file_has_the_same_identity_wherever_it_lies(tmp_path: Path, size: int):
    content = os.urandom(size)
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "data.jsonl", tmp_path / "a/other.jsonl"):
        path.write_bytes(content)
    identity = identify(tmp_path / "data.jsonl")
    assert identity == identify(tmp_path / "a/other.jsonl")
    assert identity.bytes == size
    (tmp_path / "data.jsonl").write_bytes(content + b"\n")
    assert identify(tmp_path / "data.jsonl") != identity


def test_every_byte_of_a_file_of_ordinary_size_counts(tmp_path: Path, read: list[int]):
    path, size = tmp_path / "data.jsonl", 5 * BLOCK + 3
    path.write_bytes(bytes(size))
    identity = identify(path)
    assert read == [0, BLOCK, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK, 5 * BLOCK]
    for changed in (0, BLOCK, 3 * BLOCK - 1, size // 2, size - 1):
        content = bytearray(size)
        content[changed] = 1
        path.write_bytes(content)
        assert identify(path) != identity, changed


def test_of_a_file_of_100_gb_a_few_blocks_are_read_its_ends_among_them(tmp_path: Path, read: list[int]):
    path, size = tmp_path / "data.parquet", 100 * 10**9
    path.touch()
    os.truncate(path, size)  # a hole: it takes no room
    identity = identify(path)
    assert len(read) == SAMPLES
    assert (read[0], read[-1]) == (0, size - BLOCK)
    steps = {later - earlier for earlier, later in pairwise(read)}
    assert max(steps) - min(steps) <= 1, "the blocks are evenly spaced"
    for changed in (0, read[30] + 5, size - 1):
        with path.open("r+b") as file:
            file.seek(changed)
            file.write(b"x")
        before, identity = identity, identify(path)
        assert identity != before, changed


def test_a_model_is_known_by_its_configuration_tokenizer_and_weights(tmp_path: Path):
    (tmp_path / "model").mkdir()
    names = ("config.json", "tokenizer.json", "model-1.safetensors", "model.safetensors.index.json")
    for name in names:
        (tmp_path / "model" / name).write_text(name)
    identity = identify(tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("words")
    (tmp_path / "model").rename(tmp_path / "policy")
    assert identify(tmp_path / "policy") == identity
    for name in names:
        path = tmp_path / "policy" / name
        path.write_text(name.upper())
        assert identify(tmp_path / "policy") != identity, name
        path.write_text(name)
    (tmp_path / "policy" / "tokenizer.json").rename(tmp_path / "policy" / "tokenizer.model")
    assert identify(tmp_path / "policy") != identity


def test_of_the_large_files_of_a_model_only_a_few_blocks_are_read(tmp_path: Path, read: list[int]):
    for number in range(3):
        path = tmp_path / f"model-{number}.safetensors"
        path.touch()
        os.truncate(path, 5 * 10**9)
    assert identify(tmp_path).bytes == 15 * 10**9
    assert len(read) == 3 * WEIGHT_SAMPLES
