"""``slipstream status``, ``logs`` and ``stop``: with stand-ins for Slurm's commands, and a process here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.backend.cli.app import app
from slipstream.backend.commands import manage, slurm_jobs
from slipstream.backend.commands.outcome import Failed, WrongInput
from slipstream.backend.driver.start.job import record_job
from tests.environment import environment, killed_at_end
from tests.unit.run_folders import metrics_line, recipe, start_line, write_lines

RECORD = (
    "JobId=7 JobName=slipstream UserId=me(1000) JobState={state} Reason={reason} Dependency=(null) "
    "Restarts={restarts} ExitCode={code} RunTime=00:01:53 StartTime=2026-11-27T22:46:48 "
    "EndTime=2026-11-28T22:46:48 NodeList={nodes} BatchHost=node1 "
    "Command=/a b/train.sbatch r.yaml run.steps=3 StdOut={output} Power="
)
SCONTROL = """#!/bin/bash
echo "scontrol $*" >>"{folder}/calls"
[[ -s "{folder}/record" ]] || {{ echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }}
cat "{folder}/record"
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >>"{folder}/calls"
[[ $* != *--signal* || ! -e "{folder}/stubborn" ]] || exit 0
sed -i 's/JobState=[A-Z]*/JobState={end}/' "{folder}/record"
"""
REQUEUED = """[[ $* != *--signal* ]] || sed -i 's/JobState=[A-Z]*/JobState=PENDING/' "{folder}/record"
"""
"""After SCANCEL: what a job does that has itself started again when its run has ended."""


class Slurm:
    """Slurm's commands of one job, in a folder that is on the PATH."""

    def __init__(self, folder: Path, path: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        for name, text in (("scontrol", SCONTROL), ("scancel", SCANCEL)):
            (folder / name).write_text(text.format(folder=folder, end="CANCELLED"))
            (folder / name).chmod(0o755)
        path.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")

    def says(self, state: str, **fields: str) -> None:
        given = {"reason": "None", "restarts": "0", "code": "0:0", "nodes": "node[1-2]", "output": "/no/out"}
        (self.folder / "record").write_text(RECORD.format(state=state, **(given | fields)) + "\n")

    @property
    def cancelled(self) -> list[str]:
        calls = (self.folder / "calls").read_text().splitlines()
        return [call for call in calls if call.startswith("scancel")]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setattr(manage, "EVERY_S", 0.01)
    return Slurm(tmp_path / "slurm bin", monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run after six steps, which job 7 drives."""
    folder = tmp_path / "runs" / "tiny"
    lines = [metrics_line(step, step) for step in range(1, 7)]
    write_lines(folder / "metrics.jsonl", [start_line(recipe()), *lines])
    record_job(folder, {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "alpha"})
    (folder / "driver.log").write_text("0:01  training\n0:09  step 6/12  lag 3/4\n")
    return folder


def said(command, *arguments) -> str:
    lines: list[str] = []
    command(*arguments, lines.append)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("state", "fields", "words"),
    [
        ("RUNNING", {}, ["job 7 is running on node[1-2], until 2026-11-28", "now: 0:09  step 6/12"]),
        ("RUNNING", {"restarts": "2"}, ["start 3"]),
        ("PENDING", {"reason": "Priority"}, ["job 7 waits: Priority; expected to start at 2026-11-27T22"]),
        ("PENDING", {"reason": "BeginTime", "restarts": "1"}, ["job 7 waits: BeginTime, start 2"]),
        ("CONFIGURING", {}, ["job 7 waits: CONFIGURING"]),
        ("POWER_UP_NODE", {}, ["job 7 waits: POWER_UP_NODE"]),
        ("RESV_DEL_HOLD", {"reason": "ReservationDeleted"}, ["job 7 waits: ReservationDeleted"]),
        ("FAILED", {"code": "1:0"}, ["job 7 has ended: FAILED, exit code 1; the run has no summary"]),
        ("NODE_FAIL", {}, ["job 7 has ended: NODE_FAIL"]),
        ("TIMEOUT", {"code": "0:15"}, ["job 7 has ended: TIMEOUT, exit code 0"]),
        ("COMPLETING", {}, ["job 7 is completing on"]),
    ],
)
def test_status_says_what_slurm_and_the_files_say(slurm: Slurm, run: Path, state, fields, words):
    slurm.says(state, **fields)
    text = said(manage.status, str(run))
    assert text.startswith("tiny: job 7 ")
    assert "  step 6/12, lag 3/4; last step " in text
    assert all(word in text for word in words), text
    assert ("now: " in text) == (state not in ("FAILED", "NODE_FAIL", "TIMEOUT"))


def test_a_job_that_has_not_begun_is_known_by_its_number(slurm: Slurm):
    slurm.says("PENDING", reason="Resources")
    assert said(manage.status, "7") == (
        "job 7: job 7 waits: Resources; expected to start at 2026-11-27T22:46:48"
    )


def test_a_job_that_slurm_has_forgotten_is_over(slurm: Slurm, run: Path):
    assert "job 7 is over, and Slurm has forgotten it" in said(manage.status, str(run))
    assert "is over" in said(manage.stop, str(run), 1.0)
    with pytest.raises(WrongInput, match="8: Slurm knows no job of this number"):
        manage.status("8", print)


def test_without_slurm_the_files_alone_are_read(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "step 6/12" in said(manage.status, str(run))
    with pytest.raises(Failed, match="no scontrol on the PATH"):
        manage.status("8", print)


def test_what_is_no_run_is_refused(tmp_path: Path):
    (tmp_path / "thesis").mkdir()
    for name, reason in (("thesis", "not the folder of a run"), ("absent", "no such folder")):
        ended = CliRunner().invoke(app, ["status", str(tmp_path / name)])
        assert ended.exit_code == 2 and reason in ended.output


def test_a_slurm_that_does_not_answer_is_a_failure(slurm: Slurm, run: Path):
    (slurm.folder / "scontrol").write_text("#!/bin/sh\necho unable to contact slurm controller >&2; exit 1\n")
    with pytest.raises(Failed, match="unable to contact slurm controller"):
        manage.status(str(run), print)


def test_logs_end_with_the_driver_before_the_trainer_before_the_engines(slurm: Slurm, run: Path):
    output = run.parent / "slipstream-7.out"
    output.write_text("slipstream: job 7\n")
    slurm.says("RUNNING", output=str(output))
    (run / "logs").mkdir()
    for name in ("engine-10", "engine-2", "collector-0", "trainer-0"):
        (run / "logs" / f"{name}.log").write_text(f"first of {name}\nsecond of {name}\n")
    lines = said(manage.logs, str(run), [], 1).splitlines()
    assert [Path(line.removeprefix("==> ")).stem for line in lines if line.startswith("==>")] == [
        *["slipstream-7", "driver", "trainer-0", "engine-2", "engine-10", "collector-0"]
    ]
    assert "second of engine-2" in lines and "first of engine-2" not in lines
    assert said(manage.logs, str(run), ["engine-1"], 2).splitlines()[1:] == [
        "first of engine-10",
        "second of engine-10",
    ]
    with pytest.raises(WrongInput, match="no log that begins with judge"):
        manage.logs(str(run), ["judge"], 1, print)


def test_of_many_logs_the_ends_of_the_first_are_shown(slurm: Slurm, run: Path):
    slurm.says("RUNNING")
    (run / "logs").mkdir()
    for rank in range(40):
        (run / "logs" / f"trainer-{rank}.log").write_text(f"the end of {rank}\n")
    text = said(manage.logs, str(run), [], 5)
    assert text.count("==> ") == 41 and text.count("the end of ") == manage.ENDS_SHOWN - 1
    assert "trainer-7" in text.splitlines()[-1]


@pytest.mark.parametrize("state", ["RUNNING", "PENDING"])
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_job_is_ended_in_order_and_then_at_once(slurm: Slurm, run: Path, state, stubborn):
    slurm.says(state)
    if stubborn:
        (slurm.folder / "stubborn").touch()
    text = said(manage.stop, str(run), 0.0 if stubborn else 60.0)
    gently, at_once = "scancel --batch --signal=TERM 7", "scancel 7"
    expected = [at_once] if state == "PENDING" else [gently, at_once] if stubborn else [gently]
    assert slurm.cancelled == expected
    assert text.endswith("job 7 has ended: CANCELLED, exit code 0; the run has no summary, so it was killed")


def test_a_job_that_is_about_to_start_again_when_it_is_to_end_is_cancelled(slurm: Slurm, run: Path):
    """The run ended for its time limit in the same moment, and the job has itself started again."""
    slurm.says("RUNNING")
    (slurm.folder / "scancel").write_text(
        SCANCEL.format(folder=slurm.folder, end="CANCELLED") + REQUEUED.format(folder=slurm.folder)
    )
    said: list[str] = []
    manage.stop(str(run), 600.0, said.append)
    assert slurm.cancelled == ["scancel --batch --signal=TERM 7", "scancel 7"]
    assert any("is about to start again: ending it" in line for line in said)
    assert "has ended: CANCELLED" in said[-1]


@pytest.mark.parametrize("by", ["scontrol", "SLURM_CLUSTERS"])
def test_a_job_of_another_cluster_with_the_same_number_is_left_alone(
    slurm: Slurm, run: Path, monkeypatch, by
):
    slurm.says("RUNNING")
    driver = {"folder": "f", "term": 1, "counter": 3, "owner": "o", "host": "elsewhere", "boot": "b"}
    driver |= {"namespace": "n", "pid": os.getpid(), "started": 1, "lease_s": 30.0, "ended": False}
    (run / "driver.json").write_text(json.dumps(driver))
    if by == "scontrol":
        with (slurm.folder / "record").open("a") as record:
            record.write("ClusterName             = beta\n")
    else:
        monkeypatch.setenv("SLURM_CLUSTERS", "beta")
    assert "cannot be seen from here" in said(manage.status, str(run))
    with pytest.raises(WrongInput, match=r"runs in job 7, .* login node of its cluster"):
        manage.stop(str(run), 1.0, print)
    calls = slurm.folder / "calls"
    assert not calls.exists() or slurm.cancelled == []


def test_an_array_runs_while_one_of_its_tasks_does(slurm: Slurm):
    slurm.says("COMPLETED")
    one = (slurm.folder / "record").read_text()
    (slurm.folder / "record").write_text(
        "".join(one.replace("COMPLETED", state) for state in ("COMPLETED", "PENDING", "RUNNING", "FAILED"))
    )
    assert "job 7 is running" in said(manage.status, "7")
    (slurm.folder / "record").write_text(one + one.replace("COMPLETED", "COMPLETING"))
    assert "job 7 is completing" in said(manage.status, "7")


def test_settings_of_the_shell_for_slurms_commands_change_nothing(slurm: Slurm, monkeypatch):
    for name in ("SCANCEL_INTERACTIVE", "SQUEUE_STATES", "SCONTROL_LOCAL", "SLURM_TIME_FORMAT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_CONF", "/slurm.conf")
    ended = slurm_jobs.called("sh", "-c", "env | grep -E '^S(CANCEL|QUEUE|CONTROL|LURM)_'; printf '\\344'")
    assert ended.stdout == "SLURM_CONF=/slurm.conf\n\N{REPLACEMENT CHARACTER}"


def test_a_job_that_has_ended_is_left_alone(slurm: Slurm, run: Path):
    slurm.says("COMPLETED")
    (run / "summary.json").write_text("{}")
    said(manage.stop, str(run), 1.0)
    assert slurm.cancelled == []


DRIVER = """
import asyncio, signal, sys
from pathlib import Path
from slipstream.rollout.ledger.lease.folder_lease import take_lease
signals = []
async def main():
    asked, loop = asyncio.Event(), asyncio.get_running_loop()
    def on_term():
        signals.append(1)
        if len(signals) == int(sys.argv[2]):
            asked.set()
    loop.add_signal_handler(signal.SIGTERM, on_term)
    lease = await take_lease(Path(sys.argv[1]), lease_s=30.0, say=print)
    print("driving", flush=True)
    await asked.wait()
    lease.release()
asyncio.run(main())
"""


@pytest.mark.parametrize("signals", [1, 2])
def test_a_run_on_this_machine_is_seen_and_ended(run: Path, signals: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manage, "EVERY_S", 0.01)
    (run / "job.json").unlink()
    with killed_at_end(
        [sys.executable, "-c", DRIVER, str(run), str(signals)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "driving\n"
        assert f"tiny: runs as process {process.pid} on" in said(manage.status, str(run))
        text = said(manage.stop, str(run), 60.0 if signals == 1 else 5.0)
        assert process.wait(60) == 0
    assert ("ending it at once" in text) == (signals == 2)
    assert "tiny: the run has no summary" in text
    assert said(manage.stop, str(run), 60.0) == text.splitlines()[-1]


def test_a_run_on_another_machine_is_not_touched(run: Path):
    (run / "job.json").unlink()
    driver = {"folder": "f", "term": 1, "counter": 3, "owner": "o", "host": "elsewhere", "boot": "b"}
    driver |= {"namespace": "n", "pid": os.getpid(), "started": 1, "lease_s": 30.0, "ended": False}
    (run / "driver.json").write_text(json.dumps(driver))
    assert "process" in said(manage.status, str(run)) and "elsewhere" in said(manage.status, str(run))
    with pytest.raises(WrongInput, match=r"on elsewhere, which cannot be seen from here: stop it there"):
        manage.stop(str(run), 1.0, print)


def test_values_with_spaces_are_read():
    fields = {"reason": "None", "restarts": "0", "code": "0:0", "nodes": "node1", "output": "/my out/b.log"}
    facts = slurm_jobs.parsed(RECORD.format(state="RUNNING", **fields))
    assert facts is not None
    assert (facts.nodes, facts.reason, facts.state) == ("node1", "", "RUNNING")
    assert facts.output == "/my out/b.log"
