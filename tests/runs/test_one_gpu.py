"""The benchmark of one GPU, on a machine without one: commands, figures and the table."""

import json
import subprocess
import sys

import pytest

from tests.environment import ROOT, environment


@pytest.mark.slow  # two whole runs; tests/unit/test_benchmarks_one_gpu.py has everything else
def test_a_dry_run_reads_the_figures_of_real_runs(tmp_path):
    arguments = ["--dry-run", "--only", "e", "--root", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.one_gpu", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    told = json.loads(ended.stdout.splitlines()[-1])
    assert ended.returncode == 0, ended.stdout
    for name in ("e-bf16", "e-fp8"):
        figures = told["e"]["commands"][name]["figures"]
        assert (figures["done"], figures["steps"], figures["discrepancies"]) == (1, 3, 0)
        assert figures["distance_mean"] < 1e-3 and figures["run_tokens_per_s"] > 0
        assert figures["lag"] == figures["lag_bound"] == 0
