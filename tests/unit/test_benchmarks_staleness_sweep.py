"""The staleness study's sweep: it does what is missing, and its results are those of single runs."""

import fcntl
import json
from pathlib import Path

import pytest
import torch

from benchmarks.staleness_study.study import Run, Setting, inputs_of
from benchmarks.staleness_study.sweep import ResultsInUse, jobs_of, read_results, sweep

SETTING = Setting("test", lr=1e-3, steps=2, eval_every=2, held_out=4)


@pytest.mark.slow  # test_benchmarks_staleness_workers.py has the workers, the study's own page the runs
def test_a_sweep_does_what_is_missing_and_its_runs_are_those_of_this_process(tmp_path: Path):
    path, plan = tmp_path / "results.jsonl", [(SETTING, [("decoupled", 1), ("naive", 1)])]
    kept = {"setting": "test", "method": "decoupled", "eta": 1, "seed": 3, "accuracy": "kept"}
    path.write_text(json.dumps(kept) + "\n" + json.dumps(kept)[:40], encoding="utf-8")
    said: list[str] = []
    sweep(plan, [3], path, tmp_path, said.append, workers=1, warm_steps=1)
    records = read_results(path)
    assert records["test", "decoupled", 1, 3] == kept
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = Run(SETTING, "naive", 1, inputs_of(3, tmp_path, warm_steps=1, held_out=4)).result()
    torch.set_num_threads(threads)
    found = records["test", "naive", 1, 3]
    assert found | {"cpu_s": 0} == expected | {"cpu_s": 0}
    assert [step for step, _ in found["accuracy"]] == [0, 2]
    assert said[0] == "1 runs to do, with 1 workers"
    sweep(plan, [3], path, tmp_path, said.append, workers=1, warm_steps=1)
    assert said[-1] == "0 runs to do, with 1 workers"


def test_two_sweeps_do_not_write_the_same_results(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    with path.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ResultsInUse, match="another sweep is writing"):
            sweep([], [3], path, tmp_path, print, workers=1)


def test_a_cell_that_a_plan_names_twice_is_run_once():
    plan = [(SETTING, [("naive", 1)]), (SETTING, [("naive", 1), ("dppo", 1)])]
    assert [str(job) for job in jobs_of(plan, [0, 1])] == [
        f"test {method} eta 1 seed {seed}" for method in ("naive", "dppo") for seed in (0, 1)
    ]
