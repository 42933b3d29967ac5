"""The run folder: written so that a kill leaves whole files, opened by one process, for the run it holds."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import yaml

from slipstream.backend.checkpoint.folder import CheckpointFolder
from slipstream.backend.commands.audit import audit_run
from slipstream.backend.driver.modes.sft import open_folder
from slipstream.backend.driver.start import resume as resume_module
from slipstream.backend.driver.start import run_folder
from slipstream.backend.driver.start.inputs import InputError
from slipstream.backend.driver.start.resume import RunState, open_run
from slipstream.backend.driver.start.run_folder import FIXED, check_same_run, recipe_text
from slipstream.backend.driver.weights.checkpointing import NoHistory, TrainerCheckpoints
from slipstream.configs.schema import CheckpointConfig, RunConfig
from slipstream.rollout.control.ends import GroupCounts
from slipstream.rollout.ledger.lease.driver_file import look
from slipstream.rollout.ledger.lease.folder_lease import Fenced
from slipstream.rollout.ledger.storage.database import LedgerBusy
from slipstream.rollout.prompts import PromptSet
from slipstream.rollout.system.durable import write_durably
from slipstream.rollout.tokens.trajectory import Prompt
from tests.environment import environment
from tests.selection import shortened

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


class Silent:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def phase(self, text: str) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        self.notes.append(text)


def recipe(folder: Path, **sections) -> RunConfig:
    content = {
        "run": {"name": "run", "root": str(folder / "runs"), "steps": 20},
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "train.jsonl")},
        "eval": {"path": str(folder / "heldout.jsonl")},
        "rollout": {
            "max_head_offpolicyness": 2,
            "batch_size": 16,
            "n_samples_per_prompt": 8,
            "reward": "slipstream.rollout.reward.FinalAnswer",
        },
    }
    return RunConfig.model_validate(content | sections)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text(f"content of {name}")
    for name in ("train.jsonl", "heldout.jsonl"):
        (tmp_path / name).write_text("".join(f'{{"prompt": "{name} {i}"}}\n' for i in range(100)))
    return recipe(tmp_path)


async def opened(
    config: RunConfig, resume: bool, accept: bool = False, overwrite: bool = False
) -> tuple[RunState, list[str]]:
    progress = Silent()
    inputs = SimpleNamespace(prompts=PromptSet.of([Prompt(0, "a prompt")]))
    _, state = await open_run(config, inputs, progress, resume, accept, overwrite=overwrite)  # type: ignore
    return state, progress.notes


def live(config: RunConfig, resume: bool = False, accept: bool = False, overwrite: bool = False) -> list[str]:
    """Open the run and close it again. Return what the user is told."""
    state, notes = asyncio.run(opened(config, resume, accept, overwrite))
    state.ledger.close()
    state.lease.release()
    return notes


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# ---- whole files


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch):
    def full_disk(descriptor: int) -> None:
        raise OSError("no space left on device")

    path = tmp_path / "file"
    write_durably(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="no space"):
            write_durably(path, "new")
    assert path.read_text() == "old"
    write_durably(path, "newer")
    assert path.read_text() == "newer"
    assert list(tmp_path.iterdir()) == [path]


def test_a_resume_replaces_its_files_by_rename(config: RunConfig, tmp_path: Path):
    """A hard link shows it: whoever writes in place writes into the link, too."""
    live(config)
    folder = config.run.folder
    for name in ("recipe.yaml", "inputs.json"):
        os.link(folder / name, tmp_path / name)
    before = {name: (tmp_path / name).read_text() for name in ("recipe.yaml", "inputs.json")}
    run = config.run.model_copy(update={"steps": 40})
    shutil.move(config.data.path, tmp_path / "moved.jsonl")
    data = config.data.model_copy(update={"path": tmp_path / "moved.jsonl"})
    live(config.model_copy(update={"run": run, "data": data}), resume=True)
    for name, content in before.items():
        assert (tmp_path / name).read_text() == content
        assert (folder / name).read_text() != content


# ---- the recipe


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"# nothing but a comment\n", "it is empty"),
        (b"- a\n- b\n", "it holds a list"),
        (b"42\n", "it holds a int"),
        (b"run:\n  seed: 0\ndata:\n", r"it lacks rollout\.batch_size"),
        (b"run: text\n", r"it lacks run\.seed"),
        (b"run: {seed: 0\n", "while parsing"),
        (b"\xff\xfe\x00", "decode"),
        (b"[" * 5000, "recursion|while parsing"),
        (None, "it is missing"),
    ],
)
def test_a_damaged_recipe_is_refused_with_what_to_do(config: RunConfig, content: bytes | None, reason: str):
    live(config)
    path = config.run.folder / "recipe.yaml"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    before = files(config.run.folder)
    with pytest.raises(InputError, match=rf"recipe\.yaml is damaged: .*({reason})") as error:
        live(config, resume=True)
    assert "metrics.jsonl has one" in str(error.value) and "start anew with --overwrite" in str(error.value)
    assert "\n" not in str(error.value)
    assert files(config.run.folder) == before


def test_a_recipe_that_ends_anywhere_is_never_a_crash(config: RunConfig):
    live(config)
    path = config.run.folder / "recipe.yaml"
    whole = path.read_bytes()
    for end in range(0, len(whole), 31):
        path.write_bytes(whole[:end])
        try:
            check_same_run(config)
        except InputError:
            continue
        remaining = yaml.safe_load(path.read_bytes())
        assert all(remaining[key.split(".")[0]][key.split(".")[1]] is not None for key in FIXED)


def test_a_damaged_recipe_is_exit_code_2_of_a_resume(config: RunConfig, start):
    live(config)
    (config.run.folder / "recipe.yaml").write_bytes(b"")
    process = start(config, "here", "resume")
    assert "recipe.yaml is damaged: it is empty" in process.communicate(timeout=240)[0]
    assert process.returncode == 2


# ---- the inputs


def test_equal_inputs_at_other_paths_are_accepted(config: RunConfig, tmp_path: Path):
    live(config)
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("model", "train.jsonl", "heldout.jsonl"):
        shutil.move(tmp_path / name, moved)
    notes = live(recipe(moved, run=config.run.model_dump()), resume=True)
    assert not [note for note in notes if "accepted" in note]
    record = json.loads((config.run.folder / "inputs.json").read_text())
    assert record["inputs"]["data.path"]["path"] == str(moved / "train.jsonl")
    assert record["accepted"] == []


CHANGES = {
    "data.path": lambda folder: (folder / "train.jsonl").write_text('{"prompt": "another"}\n'),
    "eval.path": lambda folder: (folder / "heldout.jsonl").write_text('{"prompt": "another"}\n'),
    "model.path": lambda folder: (folder / "model/tokenizer.json").write_text("another"),
}


@pytest.mark.parametrize("setting", CHANGES)
def test_a_changed_input_at_the_same_path_is_refused_unless_it_is_accepted(
    config: RunConfig, tmp_path: Path, setting: str
):
    live(config)
    CHANGES[setting](tmp_path)
    before = files(config.run.folder)
    with pytest.raises(InputError) as error:
        live(config, resume=True)
    message = str(error.value)
    known = json.loads(before["inputs.json"])["inputs"][setting]
    assert message.startswith(f"{setting}: {known['path']} with ") and message.count(setting) == 1
    assert f"the run has used {known['path']} with {known['identity']['bytes']:,} bytes, SHA-256" in message
    assert known["identity"]["sha256"][:16] in message
    assert "--accept-changed-inputs" in message and "choose another run.name" in message
    assert files(config.run.folder) == before

    [note] = [note for note in live(config, resume=True, accept=True) if "accepted" in note]
    assert setting in note
    record = json.loads((config.run.folder / "inputs.json").read_text())
    [change] = record["accepted"]
    assert (change["setting"], change["before"]) == (setting, known)
    assert change["after"] == record["inputs"][setting] != known
    live(config, resume=True)
    assert json.loads((config.run.folder / "inputs.json").read_text()) == record


def test_all_changed_inputs_are_named_at_once(config: RunConfig, tmp_path: Path):
    live(config)
    for change in CHANGES.values():
        change(tmp_path)
    with pytest.raises(InputError) as error:
        live(config, resume=True)
    assert all(setting in str(error.value) for setting in CHANGES)


def test_a_first_evaluation_and_one_that_is_left_out_are_no_changes(config: RunConfig, tmp_path: Path):
    without = config.model_copy(update={"eval": None})
    live(without)
    live(config, resume=True)
    live(without, resume=True)
    CHANGES["eval.path"](tmp_path)
    with pytest.raises(InputError, match=r"eval\.path"):
        live(config, resume=True)


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"inputs": 3}', b"\xff"])
def test_a_run_whose_inputs_are_not_known_goes_on_only_with_those_that_the_user_accepts(
    config: RunConfig, content: bytes | None
):
    live(config)
    path = config.run.folder / "inputs.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        InputError,
        match=r"inputs\.json (is missing|cannot be understood).*\n.*restore inputs\.json .*--accept-changed",
    ):
        live(config, resume=True)
    live(config, resume=True, accept=True)
    record = json.loads(path.read_text())
    assert {change["setting"] for change in record["accepted"]} == set(CHANGES)
    assert all(change["before"] is None for change in record["accepted"])
    live(config, resume=True)


# ---- one process


def test_a_run_is_refused_while_it_is_open_and_nothing_is_changed(config: RunConfig):
    async def meet() -> None:
        state, _ = await opened(config, False)
        before = files(folder)
        for resume in (False, True):
            with pytest.raises(InputError, match="another process is running this run"):
                await opened(config, resume)
        assert files(folder) == before
        assert [path.name for path in folder.parent.iterdir()] == ["run"]
        state.ledger.close()
        state.lease.release()

    folder = config.run.folder
    asyncio.run(meet())
    live(config, resume=True)


def test_a_resume_without_a_ledger_sets_the_folder_aside(config: RunConfig):
    live(config)
    folder = config.run.folder
    (folder / "ledger.sqlite").unlink()
    (folder / "notes.txt").write_text("mine")
    [told, *_] = live(config, resume=True)
    assert "nothing to resume" in told
    [aside] = [path for path in folder.parent.iterdir() if path != folder]
    assert aside.name.startswith("run.2") and (aside / "notes.txt").read_text() == "mine"
    driver = look(aside).driver
    assert driver is not None and driver.ended, "a run that was set aside can be resumed under its new name"


def test_an_earlier_run_is_refused_with_what_to_do_and_nothing_is_changed(config: RunConfig):
    live(config)
    before = files(config.run.folder)
    with pytest.raises(InputError, match=r"earlier run.*--resume.*--overwrite.*run\.name=NAME"):
        live(config)
    assert files(config.run.folder) == before
    assert [path.name for path in config.run.folder.parent.iterdir()] == ["run"]


def test_an_earlier_run_is_deleted_only_when_it_is_asked_for(config: RunConfig):
    live(config)
    (config.run.folder / "notes.txt").write_text("of the earlier run")
    live(config, overwrite=True)
    assert [path.name for path in config.run.folder.parent.iterdir()] == ["run"]
    assert not (config.run.folder / "notes.txt").exists()
    live(config, resume=True)


def test_a_folder_that_is_no_run_is_never_deleted(config: RunConfig):
    config.run.folder.mkdir(parents=True)
    (config.run.folder / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="not the folder of a run"):
        live(config, overwrite=True)
    assert (config.run.folder / "thesis.tex").exists()


def test_a_folder_of_the_users_with_a_recipe_is_never_deleted(config: RunConfig):
    config.run.folder.mkdir(parents=True)
    (config.run.folder / "recipe.yaml").write_text("run: {name: run}")
    with pytest.raises(InputError, match="not the folder of a run"):
        live(config, overwrite=True)
    assert [path.name for path in config.run.folder.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize("how", [{"overwrite": True}, {"resume": True}])
def test_a_folder_with_what_the_run_reads_stays(config: RunConfig, monkeypatch, how: dict[str, bool]):
    live(config)
    (config.run.folder / "ledger.sqlite").unlink()
    model = config.run.folder / "checkpoint-hf"
    shutil.copytree(config.model.path, model)
    reads = config.model_copy(update={"model": config.model.model_copy(update={"path": model})})
    monkeypatch.chdir(config.run.folder)
    with pytest.raises(InputError, match=r"in which it is started, model\.path \(.*checkpoint-hf\)"):
        live(reads, **how)
    assert (model / "config.json").exists()
    assert [path.name for path in config.run.folder.parent.iterdir()] == ["run"]


def test_an_empty_folder_is_used_and_not_replaced(config: RunConfig):
    """Another process may have made the empty folder a moment ago, and takes its lease next."""
    config.run.folder.mkdir(parents=True, mode=0o700)
    before = config.run.folder.stat().st_ino
    live(config)
    assert config.run.folder.stat().st_ino == before
    assert oct(config.run.folder.stat().st_mode & 0o777) == oct(int(config.run.mode, 8))


def test_a_run_that_cannot_be_opened_is_given_back(config: RunConfig):
    live(config)
    ledger = config.run.folder / "ledger.sqlite"
    content = ledger.read_bytes()
    ledger.write_bytes(b"damaged" * 1000)
    with pytest.raises(InputError, match="damaged"):
        live(config, resume=True)
    ledger.write_bytes(content)
    live(config, resume=True)


def test_the_lease_is_renewed_while_the_last_checkpoint_is_checked(config: RunConfig, monkeypatch):
    """Every byte of it is read, which takes minutes, and the event loop waits."""

    def long_check(config: RunConfig) -> None:
        deadline = time.monotonic() + 60
        while (driver := look(config.run.folder).driver) is None or driver.counter < 3:
            assert time.monotonic() < deadline

    config = config.model_copy(update={"run": config.run.model_copy(update={"lease_s": 1.0})})
    live(config)
    monkeypatch.setattr(resume_module, "find_checkpoint", long_check)
    live(config, resume=True)


def test_a_driver_that_was_fenced_before_it_opens_the_ledger_does_not_touch_it(
    config: RunConfig, monkeypatch
):
    def fenced(config: RunConfig) -> None:
        driver = look(config.run.folder).driver
        assert driver is not None
        other = msgspec.structs.replace(driver, term=driver.term + 1, owner="other", host="elsewhere")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and "lease" in {thread.name for thread in threading.enumerate()}:
            # Again and again, as a driver does: a renewal of the first may have been under way.
            write_durably(config.run.folder / "driver.json", msgspec.json.encode(other).decode())
            time.sleep(0.01)

    config = config.model_copy(update={"run": config.run.model_copy(update={"lease_s": 1.0})})
    live(config)
    before = (config.run.folder / "ledger.sqlite").read_bytes()
    monkeypatch.setattr(resume_module, "find_checkpoint", fenced)
    with pytest.raises(InputError, match=r"fenced: .*on elsewhere has taken the run over"):
        live(config, resume=True)
    assert (config.run.folder / "ledger.sqlite").read_bytes() == before


def test_a_run_is_not_audited_while_it_is_open(config: RunConfig, monkeypatch):
    """Also where SQLite would let it: an audit that closes the ledger would remove the write-ahead log."""

    async def open_for_good() -> RunState:
        state, _ = await opened(config, False)
        return state

    state = asyncio.run(open_for_good())
    opening = []
    with monkeypatch.context() as patch:
        patch.setattr("slipstream.backend.commands.audit.audit_ledger", opening.append)
        with pytest.raises(LedgerBusy, match="another process is running this run"):
            audit_run(config.run.folder, print)
    assert opening == []
    state.ledger.close()
    state.lease.release()
    assert audit_run(config.run.folder, print).discrepancies == []


def test_a_supervised_run_is_opened_by_one_process_and_given_back(config: RunConfig):
    async def meet() -> None:
        lease, checkpoint = await open_folder(config, Silent(), False, False)  # type: ignore[arg-type]
        assert checkpoint is None
        for resume in (False, True):
            with pytest.raises(InputError, match="another process is running this run"):
                await open_folder(config, Silent(), resume, False)  # type: ignore[arg-type]
        lease.release()
        again = Silent()
        lease, checkpoint = await open_folder(config, again, True, False)  # type: ignore[arg-type]
        assert checkpoint is None
        assert again.notes[0] == f"no checkpoint in {config.run.folder}: the run starts from the beginning"
        assert again.notes[1].startswith(f"what was in {config.run.folder} lies in ")
        lease.release()

    asyncio.run(meet())
    assert len(list(config.run.folder.parent.iterdir())) == 2


@pytest.mark.parametrize("fenced_at", ["the beginning", "the commit"])
def test_a_fenced_driver_neither_deletes_nor_commits_a_checkpoint(tmp_path: Path, fenced_at: str):
    """The beginning of a checkpoint deletes what an earlier process has left unfinished."""
    calls = iter([fenced_at == "the beginning", True])

    def fence() -> None:
        if next(calls):
            raise Fenced("fenced")

    class Trainer:
        async def begin_checkpoint(self, folder: Path, tokens: None) -> None:
            (folder / "weights").write_text("of the fenced driver")

        async def checkpoint_written(self) -> None:
            """Nothing is left to write."""

        async def finish_checkpoint(self) -> list[str]:
            return []

    other = CheckpointFolder(tmp_path, keep_last=1).begin(4)
    checkpoints = TrainerCheckpoints(
        CheckpointConfig(every=1),
        CheckpointFolder(tmp_path, keep_last=1),
        Trainer(),
        nullcontext,
        NoHistory(fence=fence),
        SimpleNamespace(
            checkpoint_taken=lambda stall_s: None,
            checkpoint_committed=lambda step, seconds: None,
            note=print,
        ),
    )
    position = SimpleNamespace(version=3, step=3, position=3, counts=GroupCounts())
    with pytest.raises(Fenced):
        asyncio.run(checkpoints.last(position))  # type: ignore[arg-type]
    assert CheckpointFolder(tmp_path, keep_last=1).all() == []
    assert other.exists() == (fenced_at == "the beginning")


def test_a_file_system_without_working_locks_is_named(config: RunConfig, monkeypatch):
    assert not [note for note in live(config) if "locks" in note]
    monkeypatch.setattr(run_folder, "lock_problem", lambda folder: "flock: No locks available")
    [note] = [note for note in live(config, resume=True) if "locks" in note]
    assert "has no working locks (flock: No locks available)" in note and "run.lease_s" in note


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    processes: list[subprocess.Popen[str]] = []

    def launch(config: RunConfig, *arguments: str) -> subprocess.Popen[str]:
        path = tmp_path / "recipe.yaml"
        path.write_text(recipe_text(config))
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.unit.open_run_process", str(path), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment(),
            )
        )
        return processes[-1]

    yield launch
    for process in processes:
        process.kill()
        process.communicate()


LOCKS = (("here", "here"), ("here", "here", "nolocks"), ("here", "there", "nolocks"))
OPENED = [(how, locks) for how in ("resume", "start") for locks in LOCKS]
KEPT_OPENED = [("start", LOCKS[0]), ("resume", LOCKS[2])]


@pytest.mark.parametrize(("how", "locks"), shortened(OPENED, KEPT_OPENED))
def test_of_two_processes_that_open_a_run_at_once_one_is_refused_with_exit_code_2(
    config: RunConfig, start, how: str, locks: tuple[str, ...]
):
    run = config.run.model_copy(update={"lease_s": 3.0})
    config = config.model_copy(update={"run": run})
    if how == "resume":
        live(config)
    hosts, options = locks[:2], [*locks[2:], *(["resume"] if how == "resume" else [])]
    processes = [start(config, host, *options) for host in hosts]
    lines = [process.stdout.readline() for process in processes]
    [winner] = [number for number, line in enumerate(lines) if line.startswith("opened")]
    loser = processes[1 - winner]
    assert "another process" in lines[1 - winner], lines
    loser.communicate(timeout=240)
    assert loser.returncode == 2
    assert lines[winner].split()[1] == ("1" if how == "resume" else "0")
    processes[winner].communicate(timeout=240)
    assert processes[winner].returncode == 0
    live(config, resume=True)
