"""Who may read and write what a run writes: `run.mode` decides, whatever the user's umask is."""

import asyncio
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

from slipstream.backend.driver.start.inputs import InputError
from slipstream.backend.driver.start.run_folder import apply_mode, permissions, start_folder
from slipstream.backend.monitor.progress import PlainProgress
from slipstream.configs.schema import RunConfig


def config(root: Path, **run: object) -> RunConfig:
    inputs = root.parent / "inputs"
    return RunConfig.model_validate(
        {
            "run": {"name": "run", "root": str(root), "steps": 20, **run},
            "model": {"path": str(inputs / "model")},
            "data": {"path": str(inputs / "train.jsonl")},
            "rollout": {
                "max_head_offpolicyness": 2,
                "batch_size": 1,
                "n_samples_per_prompt": 1,
                "reward": "slipstream.rollout.reward.FinalAnswer",
            },
        }
    )


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> str:
    return f"{path.stat().st_mode & 0o777:o}"


@pytest.mark.parametrize("users", [0o000, 0o022, 0o077])
@pytest.mark.parametrize(
    ("setting", "folders", "files"), [(None, "700", "600"), ("0750", "750", "640"), ("755", "755", "644")]
)
def test_a_run_folder_and_all_below_it_have_the_permissions_of_the_recipe(
    tmp_path: Path, users: int, setting: str | None, folders: str, files: str
):
    recipe = config(tmp_path / "runs", **({"mode": setting} if setting else {}))
    recipe.model.path.mkdir(parents=True)
    (recipe.model.path / "config.json").write_text("{}")
    recipe.data.path.write_text('{"prompt": "?"}\n')
    with umask(users):
        with permissions(recipe):
            asyncio.run(start_folder(recipe, PlainProgress(1, io.StringIO(), clock=lambda: 0.0))).release()
            folder = recipe.run.folder
            (folder / "checkpoints/v1").mkdir(parents=True)
            (folder / "checkpoints/v1/shard").write_bytes(b"1")
        assert os.umask(users) == users, "the process has its own umask back"
    below = [folder, *folder.rglob("*")]
    assert {mode(path) for path in below if path.is_dir()} == {folders}
    assert {mode(path) for path in below if path.is_file()} == {files}


def test_the_folder_of_all_runs_is_not_closed_to_others(tmp_path: Path):
    with umask(0o022), permissions(config(tmp_path / "shared/runs")):
        pass
    assert mode(tmp_path / "shared/runs") == "755"


def test_a_folder_of_runs_that_cannot_be_made_is_an_input_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match=r"cannot use .*file/runs"),
        permissions(config(tmp_path / "file/runs")),
    ):
        pass


def test_a_resumed_run_is_closed_as_its_recipe_says(tmp_path: Path):
    recipe = config(tmp_path)
    recipe.run.folder.mkdir(mode=0o755)
    apply_mode(recipe)
    assert mode(recipe.run.folder) == "700"


@pytest.mark.parametrize("wrong", ["0777", "0702", "0070", "700x", "7", "0o700", "u=rwx"])
def test_a_mode_that_lets_everybody_write_or_the_owner_not_is_refused(tmp_path: Path, wrong: str):
    with pytest.raises(ValidationError, match=r"run\.mode"):
        config(tmp_path, mode=wrong)


def test_a_mode_without_quotes_is_refused(tmp_path: Path):
    with pytest.raises(ValidationError, match=r"run\.mode"):
        config(tmp_path, mode=700)
