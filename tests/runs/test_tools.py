"""A whole run of conversations with tools: what is trained is what the policy said, and no word of a tool."""

import json
import re
import subprocess
from collections.abc import Iterator

import pytest
import yaml
from transformers import AutoTokenizer

from benchmarks.tool_learning.run import GROUPS, SAMPLES, prepare, recipe
from tests.chat_model import END, START
from tests.environment import environment
from tests.runs.conftest import LaunchedRun, RunProcess, run_command
from tests.runs.stored import stored
from tests.runs.test_run import finish, records, summary

STEPS, WARM_START_STEPS = 2, 100

CALL = re.compile(r'\[calc\(e="(-?\d+[+-]\d)"\)\]')


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedRun]:
    """A run that has come to its end."""
    folder = tmp_path_factory.mktemp("tools")
    prepare(folder / "inputs", 0, WARM_START_STEPS)
    settings = recipe(folder / "inputs", folder, 0, STEPS)
    settings["run"]["name"] = "run"
    settings["eval"]["max_prompts"] = 8
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    with (folder / "run.out").open("w") as out:
        process = RunProcess(
            run_command("train", str(folder / "recipe.yaml")), out, environment=environment()
        )
    launched = LaunchedRun(process, folder / "run")
    try:
        assert finish(launched) == 0, launched.output()
        launched.assert_nothing_left()
        yield launched
    finally:
        launched.end()


def spoken(tokens: list[str]) -> list[bool]:
    """Say of each token whether the policy sampled it: all behind the mark of its turns, with their ends."""
    is_own, flags = False, []
    for place, token in enumerate(tokens):
        flags.append(is_own)
        if token == END:
            is_own = False
        elif place and (tokens[place - 1], token) == (START, "a"):
            is_own = True
    return flags


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_the_policy_said_is_trained_and_what_tools_answered_is_not(run: LaunchedRun):
    tokenizer = AutoTokenizer.from_pretrained(run.folder.parent / "inputs/policy")
    episodes = stored(run.folder).trajectories.values()
    assert len(episodes) >= STEPS * GROUPS * SAMPLES
    results = 0
    for episode in episodes:
        ids = episode.tokens_T.tolist()
        tokens = [tokenizer.decode([token]) for token in ids]
        assert episode.loss_mask_T.tolist() == spoken(tokens)
        assert (episode.logprobs_T[episode.loss_mask_T] < 0).all()
        _, *turns = tokenizer.decode(ids).split(f"{START}a")
        for answer in turns[:-1]:
            said, result = answer.split(f"{END}{START}t")
            if (call := CALL.fullmatch(said)) is not None:
                assert result == str(eval(call.group(1)))
                results += 1
    assert results > len(episodes), "most episodes call the calculator twice"
    calculated = [step["mismatch/logprob_abs_max"] for step in records(run)]
    assert max(calculated[:1]) < 1e-4, "the trainer computes for the first batch what the engine did"


@pytest.mark.slow
def test_the_audit_is_clean_and_every_group_was_trained(run: LaunchedRun):
    audit = subprocess.run(
        run_command("audit", str(run.folder), "--json"), capture_output=True, text=True, timeout=120
    )
    assert json.loads(audit.stdout)["clean"], audit.stdout + audit.stderr
    groups = summary(run)["groups"]
    assert (groups["trained"], groups["failed"]) == (STEPS * GROUPS, 0), run.output()
