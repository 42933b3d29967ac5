"""The halves of a run alone: batches that one saves are trained by the other, twice with the same metrics."""

import json

import pytest

from slipstream.backend.batch.saved import read_batch

MEASURED_TIMES = ("time", "perf/")


def metrics_of(folder) -> list[dict]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {tag: value for tag, value in record.items() if not tag.startswith(MEASURED_TIMES)}
        for record in records
        if "train/step" in record
    ]


@pytest.mark.slow
def test_what_the_rollout_half_saves_the_trainer_half_trains(launch):
    steps = "run.steps=2"
    run = launch("--debug-rollout-only", steps, name="half")
    assert run.process.wait(280) == 0, run.output()
    folder = run.folder.with_name("half-rollout-only")
    batches = [read_batch(path) for path in sorted((folder / "batches").iterdir())]
    assert [batch.version for batch in batches] == [0, 1]
    assert len((folder / "episodes" / "0000-000000.jsonl").read_text().splitlines()) == sum(
        len(batch.headers) for batch in batches
    )
    assert len(metrics_of(folder)) == 2
    run.assert_nothing_left()
    trained = []
    for _ in range(2):
        run = launch("--debug-train-only", str(folder), "--overwrite", steps, name="half")
        assert run.process.wait(280) == 0, run.output()
        run.assert_nothing_left()
        trained.append(metrics_of(run.folder.with_name("half-train-only")))
    assert len(trained[0]) == 2 and trained[0][0]["train/tokens"] > 0
    assert trained[0] == trained[1]
