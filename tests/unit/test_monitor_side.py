"""What a thread finds beside the loop: computing time and memory of processes, and episodes as text."""

import json
from pathlib import Path

from slipstream.backend.cluster.node_usage import GpuSample, with_gpus
from slipstream.backend.monitor.process_usage import (
    PAGE_BYTES,
    TICKS_PER_S,
    GroupUsage,
    UsageSampler,
    usage_metrics,
)
from slipstream.backend.monitor.sample_episodes import EpisodeSamples
from slipstream.backend.monitor.side import SideMetrics
from slipstream.backend.monitor.tags import TAGS


def process(
    proc: Path, pid: int, parent: int, title: str, cpu_s: float, *, pages: int = 0, began: int = 5
) -> None:
    """Write the files of a process, which computes for ``cpu_s`` and has ``pages`` pages of its own."""
    folder = proc / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    fields = ["S", str(parent), *["0"] * 9, str(round(cpu_s * TICKS_PER_S)), "0", *["0"] * 6, str(began)]
    (folder / "stat").write_text(f"{pid} (a name) with ) in it) {' '.join(fields)} 0 0")
    (folder / "cmdline").write_bytes(title.encode() + b"\0")
    (folder / "statm").write_text(f"999 {pages + 10} 10 0 0 0 0")


def test_processes_count_for_the_actor_that_they_descend_from(tmp_path):
    now = [100.0]
    process(tmp_path, 1, 0, "raylet", 50)
    process(tmp_path, 2, 1, "ray::EngineActor.serve", 1)
    process(tmp_path, 3, 2, "sglang::scheduler", 10, pages=3)
    process(tmp_path, 4, 1, "ray::CollectorActor", 2, pages=1)
    process(tmp_path, 5, 1, "ray::UsageReader.sample", 9)
    process(tmp_path, 6, 99, "somebody else's", 9)
    sampler = UsageSampler(1, proc=tmp_path, clock=lambda: now[0])
    first = sampler.sample()
    assert set(first) == {"engines", "collectors"} and first["engines"].cpu_cores == 0
    assert first["engines"].memory_bytes == 3 * PAGE_BYTES and first["engines"].pids == {2, 3}
    now[0] = 110.0
    process(tmp_path, 3, 2, "sglang::scheduler", 15)
    process(tmp_path, 4, 1, "ray::CollectorActor", 1, began=70)  # another process with the same id
    process(tmp_path, 7, 3, "sglang::worker", 2)
    second = sampler.sample()
    assert second["engines"].cpu_cores == 0.7 and second["collectors"].cpu_cores == 0.1


def test_the_driver_of_a_run_on_one_machine_is_the_parent_of_its_raylet(tmp_path):
    process(tmp_path, 1, 0, "slipstream train", 50)
    process(tmp_path, 2, 1, "raylet", 1)
    process(tmp_path, 3, 2, "ray::TrainerActor.step", 10, pages=3)
    process(tmp_path, 4, 3, "a child", 2, pages=1)
    process(tmp_path, 5, 1, "gateway", 2, pages=1)
    [(group, usage)] = UsageSampler(1, proc=tmp_path).sample().items()
    assert (group, usage.pids, usage.memory_bytes) == ("trainer", {3, 4}, 4 * PAGE_BYTES)


def test_a_gpu_counts_for_the_groups_with_a_process_on_it():
    usage = {"engines": GroupUsage(pids=frozenset({3})), "trainer": GroupUsage(pids=frozenset({8}))}
    gpus = [GpuSample(0.5, {3: 2**30}), GpuSample(1.0, {3: 2**30, 8: 2**31}), GpuSample(0.1, {})]
    metrics = usage_metrics(with_gpus(usage, gpus))
    assert metrics["process/engines_gpu_fraction"] == 0.75 and metrics["process/engines_gpu_memory_gib"] == 2
    assert metrics["process/trainer_gpu_fraction"] == 1 and metrics["process/trainer_gpu_memory_gib"] == 2
    assert metrics.keys() <= TAGS.keys()


def test_a_source_that_fails_is_told_once_and_all_go_on():
    notes: list[str] = []
    errors = [OSError("gone"), OSError("gone")]

    def broken() -> dict[str, float]:
        if errors:
            raise errors.pop()
        return {"train/loss": 0.5}

    texts = iter(["first", "second", "third"])
    side = SideMetrics(
        [broken, lambda: {"train/lr": 1.0, "run/episodes": next(texts)}], notes.append, every_s=99
    )
    side.ask()
    assert side.latest() == {"train/lr": 1.0, "run/episodes": "first"}
    assert side.latest() == {"train/lr": 1.0}, "a text is logged once"
    side.ask()
    assert side.latest()["run/episodes"] == "second"
    assert notes == ["some metrics are missing until they can be had (OSError: gone)"]
    side.ask()
    assert side.latest()["train/loss"] == 0.5
    side.close()


def row(step: int, reward: float, lag: int, text: str) -> str:
    fields = {"step": step, "group": 3, "episode": 1, "reward": reward, "head_lag": lag, "response_tokens": 5}
    return json.dumps(fields | {"finish": "stop", "prompt": "2+2", "response": text}) + "\n"


def test_the_newest_step_is_shown_by_its_worst_best_and_stalest_episode(tmp_path):
    now = [0.0]
    samples = EpisodeSamples(tmp_path, clock=lambda: now[0])
    assert samples.metrics() == {}, "there is no log yet"
    (tmp_path / "episodes").mkdir()
    log = tmp_path / "episodes" / "0000-000000.jsonl"
    log.write_text(
        row(1, 0.5, 0, "old") + row(2, -1, 0, "bad") + row(2, 2, 1, "```good```") + row(2, 1, 4, "stale")
    )
    text = samples.metrics()["run/episodes"]
    assert text.startswith("**Step 2**") and "old" not in text
    assert "**lowest reward**: reward -1, lag 0" in text and "**largest lag**: reward 1, lag 4" in text
    assert "````\n```good```\n````" in text, "backticks of a response do not end its block"
    with log.open("a") as file:
        file.write(row(3, 1, 0, "new") + '{"step": 4, "unfini')
    assert samples.metrics() == {}, "not twice within a minute"
    now[0] = 61.0
    assert samples.metrics()["run/episodes"].startswith("**Step 3**")
    now[0] = 122.0
    assert samples.metrics() == {}, "there is no newer step"
