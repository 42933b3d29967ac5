"""slime's own CPU tests of what hooks import, against the alias and against a checkout.

    make test-slime                  the tests of this repository
    make test-slime SLIME=DIR        also those of a checkout of slime, and its example hooks, unmodified: in
                                     a collector, on ranks, and in whole runs

The last line is one JSON object: for each package tested, how many tests passed, failed or were not run, and
what has become of each example.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from slipstream.rollout.compat.slime import ALIAS
from tests.slime_examples import run_examples

ROOT = Path(__file__).parents[1]

CONTRACT = (
    "test_sample.py",
    "test_rollout_sample_hooks.py",
    "test_rm_deepscaler.py",
    "test_rm_f1.py",
    "test_rm_gpqa.py",
    "test_rm_math.py",
    "test_rm_math_dapo.py",
    "test_cp_utils.py",
    "utils/test_loss_mask_type_qwen35.py",
    "plugin_contracts",
)
"""slime's tests of modules that hooks import. Its others need a GPU or a download, or are of its trainer."""

OF_SOURCES = "test_runtime_hook_callsite_is_stable"
"""Tests that look for text in slime's own sources: they say nothing of another implementation."""

OURS = (
    "tests/unit/test_slime_alias.py",
    "tests/unit/test_slime_grading.py",
    "tests/unit/test_slime_workflow.py",
    "tests/agents/test_hooks.py",
    "tests/runs/test_slime_hooks.py",
    "tests/unit/test_trainer_slime_hooks.py",
    "tests/unit/test_trainer_slime_context.py",
)
RANK_EXAMPLES = ("tests/slime_rank_examples.py",)
"""Our tests of the checkout's example hooks for ranks."""
REQUIRED = ("pylatexenc",)
"""What slime itself imports there, and Slipstream does not."""
SCRIPTS = ("tests/slime_scripts.py",)
"""Our tests of the checkout's launch scripts and arguments."""
RUNS = ("tests/runs/slime_example_runs.py",)
"""Whole runs of the checkout's example hooks."""
TIMEOUT_S, RUNS_TIMEOUT_S = 900, 3600


def run_pytest(
    folder: Path,
    tests: tuple[str, ...],
    path: list[Path],
    options: tuple[str, ...] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    timeout_s: float = TIMEOUT_S,
) -> dict:
    """Run tests in a fresh interpreter, with ``path`` before everything else. Return counts of outcomes."""
    folders = [*map(str, path), os.environ.get("PYTHONPATH", "")]
    pytest = (sys.executable, "-P", "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider")
    ended = subprocess.run(
        [*pytest, "-W", "ignore", *options, *tests],  # -P: this folder is not importable by itself
        cwd=folder,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    print(ended.stdout, ended.stderr, sep="\n")
    outcomes = re.findall(r"(\d+) (passed|failed|error)", ended.stdout)
    counts = {kind: int(number) for number, kind in outcomes}
    return {
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
        "exit_code": ended.returncode,
    }


def main() -> int:
    """Print the outcomes, and return 0 if no test has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, help="folder of a checkout of slime")
    given: Path | None = parser.parse_args().checkout
    checkout = given.resolve() if given is not None else None
    outcome = {"ours": run_pytest(ROOT, OURS, [ROOT])}
    if checkout is not None:
        if not (checkout / "tests" / "plugin_contracts").is_dir():
            print(f"{checkout} has no tests/plugin_contracts, expected a checkout of slime", file=sys.stderr)
            return 2
        with tempfile.TemporaryDirectory() as folder:  # without slime beside them, tests import the alias
            shutil.copytree(checkout / "tests", Path(folder) / "tests")
            deselected = ("-k", f"not {OF_SOURCES}")
            shutil.copytree(checkout / "examples", Path(folder) / "examples")
            named = {"SLIME_CHECKOUT": str(checkout)}
            outcome["scripts"] = run_pytest(ROOT, SCRIPTS, [ROOT], environment=named)
            outcome["rank_examples"] = run_pytest(
                ROOT, RANK_EXAMPLES, [ROOT, Path(folder)], environment=named
            )
            outcome["alias"] = run_pytest(Path(folder) / "tests", CONTRACT, [ALIAS], deselected)
        outcome["alias_examples"] = run_examples(checkout)
        missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
        if missing:
            outcome["checkout"] = {"not_run": f"slime needs {', '.join(missing)}, which is not installed"}
        else:
            # Some of them open slime's sources by paths from its root.
            tests = tuple(f"tests/{name}" for name in CONTRACT)
            outcome["checkout"] = run_pytest(checkout, tests, [checkout])
            outcome["checkout_examples"] = run_examples(checkout, checkout)
        named = {
            "SLIME_CHECKOUT": str(checkout),
            "SLIME_SOURCES": "alias" if missing else "alias,checkout",
        }
        outcome["example_runs"] = run_pytest(ROOT, RUNS, [ROOT], environment=named, timeout_s=RUNS_TIMEOUT_S)
    print(json.dumps(outcome))
    return int(any(result.get("exit_code") for result in outcome.values()))


if __name__ == "__main__":
    sys.exit(main())
