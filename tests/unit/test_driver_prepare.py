"""A recipe's ``prepare``, in a real process of its own."""

import asyncio
import os
import textwrap

import pytest

from slipstream.backend.driver.start.prepare import PrepareFailed, input_paths, prepare_inputs
from slipstream.configs.schema import RunConfig
from tests.environment import environment

MODULE = """
    import os, signal, sys, time
    from pathlib import Path

    def works(model_path, data_path, eval_path, seed, say, size=1):
        assert all(isinstance(path, Path) for path in (model_path, data_path, eval_path))
        say(f"seed {seed}, size {size}")
        for path in (model_path, data_path, eval_path):
            path.write_text("made")
        print("x" * 200_000)
        say("done")

    def raises(say, **kwargs):
        say("begins")
        raise OSError("no room on the disk")

    def is_killed(say, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    def exits(say, **kwargs):
        print("last words", file=sys.stderr)
        sys.exit(7)

    def forgets(model_path, say, **kwargs):
        model_path.write_text("made")

    def never_ends(model_path, say, **kwargs):
        say(str(os.getpid()))
        time.sleep(600)
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    (tmp_path / "my_inputs.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.setenv("PYTHONPATH", environment(tmp_path)["PYTHONPATH"])

    def make(function: str | None, **args) -> RunConfig:
        return RunConfig.model_validate(
            {
                "run": {"name": "test", "steps": 1, "seed": 3},
                "model": {"path": str(tmp_path / "model")},
                "data": {"path": str(tmp_path / "data.jsonl")},
                "eval": {"path": str(tmp_path / "eval.jsonl")},
                "rollout": {
                    "max_head_offpolicyness": 0,
                    "batch_size": 1,
                    "n_samples_per_prompt": 2,
                    "reward": "slipstream.rollout.reward.FinalAnswer",
                },
                "prepare": function and {"path": f"my_inputs.{function}", "args": args},
            }
        )

    return make


def prepare(config: RunConfig) -> list[str]:
    lines: list[str] = []
    asyncio.run(prepare_inputs(config, lines.append))
    return lines


def test_what_it_says_is_shown_line_by_line_and_very_long_lines_are_no_trouble(config):
    made = config("works", size=4)
    assert prepare(made) == ["seed 3, size 4", "x" * 200_000, "done"]
    assert all(path.read_text() == "made" for path in input_paths(made).values())


def test_it_is_not_called_when_everything_is_there_or_when_there_is_none(config):
    prepare(config(None))
    made = config("raises")
    for path in input_paths(made).values():
        path.write_text("there")
    assert prepare(made) == []


def test_an_error_is_raised_with_the_last_lines_of_the_traceback(config):
    with pytest.raises(
        PrepareFailed, match=r"(?s)my_inputs\.raises failed with exit code 1:.*no room on the disk$"
    ):
        prepare(config("raises"))


def test_an_exit_code_is_an_error(config):
    with pytest.raises(PrepareFailed, match=r"my_inputs\.exits failed with exit code 7:\nlast words$"):
        prepare(config("exits"))


def test_a_process_that_was_killed_is_an_error_that_names_the_signal(config):
    with pytest.raises(PrepareFailed, match=r"my_inputs\.is_killed was ended by SIGKILL"):
        prepare(config("is_killed"))


def test_a_path_that_leads_nowhere_is_an_error(config):
    with pytest.raises(PrepareFailed, match="my_inputs has no 'missing'"):
        prepare(config("missing"))


def test_inputs_that_are_still_missing_afterwards_are_named(config, tmp_path):
    with pytest.raises(PrepareFailed) as raised:
        prepare(config("forgets"))
    assert str(tmp_path / "data.jsonl") in str(raised.value)
    assert str(tmp_path / "eval.jsonl") in str(raised.value)
    assert str(tmp_path / "model") not in str(raised.value)


def test_a_cancelled_run_leaves_no_process_behind(config):
    async def cancelled() -> int:
        started = asyncio.Queue()
        task = asyncio.ensure_future(prepare_inputs(config("never_ends"), started.put_nowait))
        pid = int(await asyncio.wait_for(started.get(), 120))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pid

    pid = asyncio.run(cancelled())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
