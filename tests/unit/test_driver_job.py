"""A restart of a Slurm job goes on with the run that the job has made, and with no other one."""

import asyncio
import shutil
from pathlib import Path

import pytest

from slipstream.backend.driver.modes.sft import open_folder
from slipstream.backend.driver.start import run_folder
from slipstream.backend.driver.start.inputs import InputError
from slipstream.backend.driver.start.job import (
    ARRAY,
    CLUSTER,
    JOB,
    JOB_ID,
    RESTARTS,
    TASK,
    Job,
    is_restart,
    job_in,
    record_job,
)
from slipstream.backend.driver.start.resume import open_run
from slipstream.configs.schema import RunConfig
from slipstream.rollout.prompts import PromptSet
from slipstream.rollout.tokens.trajectory import Prompt
from tests.unit.test_driver_run_folder import Silent, config, live, opened

__all__ = ["config"]


def variables(job: str | None, restarts: str | None = None, cluster: str = "alpha") -> dict[str, str]:
    """The environment of a process in a job; without ``job``, of one outside."""
    given = {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": restarts, "SLURM_CLUSTER_NAME": job and cluster}
    return {name: value for name, value in given.items() if value is not None}


@pytest.fixture
def enter(monkeypatch):
    """Puts this process into a job, or with None out of every job."""

    def into(job: str | None, restarts: str | None = None, cluster: str = "alpha") -> None:
        for name in (JOB_ID, RESTARTS, CLUSTER, ARRAY, TASK):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables(job, restarts, cluster).items():
            monkeypatch.setenv(name, value)

    into(None)
    return into


@pytest.mark.parametrize(
    ("maker", "process", "goes_on"),
    [
        (("7",), ("7", "1"), True),
        (("7", "0"), ("7", "12"), True),
        (("7", "3"), ("7", "4"), True),
        (("7",), ("7", "0"), False),
        (("7",), ("7",), False),
        (("7",), ("7", ""), False),
        (("7",), ("8", "1"), False),
        (("7",), ("8",), False),
        (("7",), ("77", "1"), False),
        (("7", "0", "alpha"), ("7", "1", "beta"), False),
        (("7", "0", ""), ("7", "1", ""), True),
        ((None,), ("7", "1"), False),
        (("7",), (None,), False),
    ],
)
def test_a_restart_is_one_that_slurm_counts_of_the_job_that_the_folder_belongs_to(
    tmp_path: Path, maker, process, goes_on
):
    record_job(tmp_path, variables(*maker))
    assert is_restart(tmp_path, variables(*process)) is goes_on


def test_each_task_of_an_array_is_a_job_of_its_own(tmp_path: Path):
    """The job number of one of the tasks is the number of the array."""
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    record_job(tmp_path, variables("7") | task)
    assert str(job_in(tmp_path)) == "job 7_3 on alpha"
    assert is_restart(tmp_path, variables("7", "1") | task)
    assert not is_restart(tmp_path, variables("8", "1") | task | {"SLURM_ARRAY_TASK_ID": "4"})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"id": 7}', b"\xff"])
def test_a_record_that_cannot_be_understood_makes_nobody_the_owner(tmp_path: Path, content: bytes):
    (tmp_path / JOB).write_bytes(content)
    assert job_in(tmp_path) is None
    assert not is_restart(tmp_path, variables("7", "1"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_requeued_job_goes_on_with_its_run_whatever_its_flags(config: RunConfig, enter, overwrite: bool):
    enter("7")
    live(config, overwrite=overwrite)
    (config.run.folder / "notes.txt").write_text("mine")
    for restart in ("1", "2"):
        enter("7", restart)
        notes = live(config, overwrite=overwrite)
        assert any("Slurm has started job 7 on alpha again" in note for note in notes)
        assert any(note.startswith("resumed from the initial weights") for note in notes)
    assert (config.run.folder / "notes.txt").read_text() == "mine"
    assert [path.name for path in config.run.folder.parent.iterdir()] == ["run"]


@pytest.mark.parametrize("process", [("8",), ("8", "1"), ("7", "1", "beta"), ("7",), (None,)])
def test_another_job_is_refused_and_told_whose_run_it_is(config: RunConfig, enter, process):
    enter("7")
    live(config)
    enter(*process)
    with pytest.raises(InputError, match=r"holds an earlier run \(job 7 on alpha\).*--resume"):
        live(config)


def test_a_requeued_job_whose_first_start_has_made_no_folder_does_what_it_was_told(config: RunConfig, enter):
    enter("7")
    live(config)
    (config.run.folder / "notes.txt").write_text("of job 7")
    enter("8", "1")  # its first start was killed before it came to the folder
    with pytest.raises(InputError, match="holds an earlier run"):
        live(config)
    live(config, overwrite=True)
    assert not (config.run.folder / "notes.txt").exists()
    assert job_in(config.run.folder) == Job(cluster="alpha", id="8")
    enter("7", "1")
    with pytest.raises(InputError, match=r"job 8 on alpha"):
        live(config)


def test_a_run_belongs_to_the_job_that_has_taken_it_over(config: RunConfig, enter):
    enter("7")
    live(config)
    enter("8")
    live(config, resume=True)
    enter("8", "1")
    live(config)
    enter("7", "1")
    with pytest.raises(InputError, match="job 8 on alpha"):
        live(config)
    enter(None)
    live(config, resume=True)
    assert job_in(config.run.folder) is None


def killed_after(config: RunConfig, last: str) -> None:
    """Leave the run folder as a driver leaves it that is killed when it has written ``last``."""
    folder, order = config.run.folder, ["driver.term.1", "driver.json", JOB, "logs", "recipe.yaml"]
    live(config)
    kept = order[: order.index(last) + 1] if last else []
    for path in folder.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("last", ["", "driver.term.1", "driver.json", JOB, "logs", "recipe.yaml"])
def test_a_job_that_was_killed_while_it_made_its_folder_goes_on(config: RunConfig, enter, last: str):
    config = config.model_copy(update={"run": config.run.model_copy(update={"lease_s": 1.0})})
    enter("7")
    killed_after(config, last)
    enter("7", "1")
    live(config)
    enter("7", "2")
    assert any("resumed from the initial weights" in note for note in live(config))


def test_a_folder_with_a_lease_alone_is_as_good_as_an_empty_one(config: RunConfig, enter):
    config = config.model_copy(update={"run": config.run.model_copy(update={"lease_s": 1.0})})
    killed_after(config, "driver.json")
    (config.run.folder / ".driver.json.draft").touch()
    live(config)


def test_a_requeued_job_of_supervised_training_goes_on_with_its_own_run(config: RunConfig, enter):
    async def life(overwrite: bool = False) -> list[str]:
        progress = Silent()
        lease, _ = await open_folder(config, progress, False, False, overwrite)  # type: ignore[arg-type]
        lease.release()
        return progress.notes

    enter("7")
    asyncio.run(life())
    enter("8", "1")
    with pytest.raises(InputError, match="job 7 on alpha"):
        asyncio.run(life())
    enter("7", "1")
    assert any("no checkpoint in" in note for note in asyncio.run(life(overwrite=True)))
    assert len(list(config.run.folder.parent.iterdir())) == 2, "the earlier start was deleted"


def test_a_half_of_a_run_begins_anew_and_sets_its_earlier_start_aside(config: RunConfig, enter):
    async def life() -> None:
        inputs = type("Inputs", (), {"prompts": PromptSet.of([Prompt(0, "a prompt")])})()
        _, state = await open_run(config, inputs, Silent(), False, whole=False)  # type: ignore[arg-type]
        state.ledger.close()
        state.lease.release()

    enter("7")
    asyncio.run(life())
    with pytest.raises(InputError, match="holds an earlier run"):
        asyncio.run(life())
    enter("7", "1")
    asyncio.run(life())
    assert len(list(config.run.folder.parent.iterdir())) == 2


def test_a_requeued_job_waits_for_the_locks_of_its_lost_node(config: RunConfig, enter, monkeypatch):
    async def meet(looks: int) -> None:
        monkeypatch.setattr(run_folder, "RESTART_LOOK_S", 0.01)
        monkeypatch.setattr(run_folder, "RESTART_LOOKS", looks)
        enter("7")
        state, _ = await opened(config, True)
        enter("7", "1")
        second = asyncio.ensure_future(opened(config, False))
        await asyncio.sleep(0.1)
        state.ledger.close()
        state.lease.release()
        state, _ = await second
        state.ledger.close()
        state.lease.release()

    with pytest.raises(InputError, match="another process is running this run"):
        asyncio.run(meet(0))
    asyncio.run(meet(100_000))
