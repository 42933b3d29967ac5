"""Each benchmark can be imported and says its options, and some run in short.

The short form of a benchmark is its own ``main`` with small numbers. It says nothing about speed: it
fails when the code that is measured has changed under the benchmark.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HAS_MAIN = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if "\ndef main()" in path.read_text(encoding="utf-8")
)
WITH_OPTIONS = [
    name
    for name in HAS_MAIN
    if "add_argument" in (ROOT / (name.replace(".", "/") + ".py")).read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", HAS_MAIN)
def test_a_benchmark_can_be_imported(name: str):
    assert callable(importlib.import_module(name).main)


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_a_benchmark_says_its_options(name: str, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().out


TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "num_hidden_layers": 1,
}


SHORT: dict[str, tuple[list[str], Any]] = {
    "episode_log": (["--episodes", "32", "--tokens", "64"], dict),
    "judging": ([], lambda: {"CALLERS": 4, "QUESTIONS": 40}),
    "long_trajectories": (["--rounds", "1", "--tokens", "8192"], lambda: {"LENGTHS": (1024, 2048)}),
    "packing": ([], lambda: {"REPEATS": 1, "SMALLER": ((64, 2),)}),
    "sandbox": (["--times", "2"], dict),
}
SLOW = {"judging"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in SHORT]
)
def test_a_benchmark_runs_in_short(name: str, monkeypatch, capsys, tmp_path):
    arguments, patches = SHORT[name]
    module = importlib.import_module(f"benchmarks.{name}")
    for attribute, value in patches().items():
        monkeypatch.setattr(module, attribute, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    module.main()
    assert capsys.readouterr().out


def test_the_benchmark_of_the_bridge_sends_a_version_and_its_changes(tmp_path: Path):
    from benchmarks import bridge

    hf = bridge.QWEN3_1_7B | TINY
    bridge.write_checkpoint(tmp_path, hf)
    whole, changed = bridge.changes(
        bridge.make_plan(bridge.spec_of(hf, Path()), bridge.Layout(), 2**20, 2), tmp_path
    )
    assert 0 < changed.bytes < whole.bytes


def test_the_benchmark_of_collection_takes_a_group_from_its_slot_to_a_version(tmp_path: Path, monkeypatch):
    from benchmarks import control

    monkeypatch.setattr(control, "TRAJECTORIES", 64)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    costs = control.measured(control.steady, control.Load(64, batch=32))
    assert costs.per_s > 0 and costs.write_ratio > 0
