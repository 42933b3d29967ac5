"""A whole run that learns from users alone: what they got is in the ledger once, and is what was trained."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quickstart_users import LONGEST_ANSWER, THANKS, WRONG, Conversations, Users
from slipstream.backend.commands.audit import audit_run
from slipstream.backend.quickstart.task import train_problems
from slipstream.backend.quickstart.tokenizer import EOS, IDS, build_tokenizer, prompt_text
from slipstream.rollout.gateway.keys import add_key
from slipstream.rollout.ledger.rows.stored_turns import named, session_of
from slipstream.rollout.ledger.storage.database import LEDGER, open_for_reading
from slipstream.rollout.ledger.storage.segments import FOLDER, Segments
from slipstream.rollout.ledger.storage.stamp import read_stamp
from slipstream.rollout.tokens.record import REF, decode_chunks
from tests.ports import held_port
from tests.runs.conftest import LaunchedRun
from tests.runs.test_run import finish, records, summary
from tests.unit.chat_server import ChatServer

STEPS, BATCH, USERS = 3, 8, 16

Launch = Callable[..., LaunchedRun]


async def talk(
    run: LaunchedRun, url: str, key: str, after_a_step: Callable[[], None] = lambda: None
) -> Users:
    """Have users talk until the run has done its steps. They praise and complain at random.

    ``after_a_step`` is called once, when the first step is done.
    """
    conversations, rng = Conversations(url, key), random.Random(1)

    async def said(_: str) -> str:
        return rng.choice([THANKS, WRONG])

    users = Users(conversations, train_problems(random.Random(1)), USERS, said)
    await conversations.ready(120)
    async with asyncio.timeout(120), users.talking():
        for steps in (1, STEPS):
            while not (run.folder / "metrics.jsonl").exists() or len(records(run)) < steps:
                assert run.process.poll() is None, run.output()
                await asyncio.sleep(0.2)
            if steps == 1:
                after_a_step()
    await conversations.close()
    return users


def stored_turns(folder: Path) -> dict[int, list[tuple[str, list[int], list[int]]]]:
    """State, context and sampled ids of all turns that are no side turns, by session."""
    path = folder / LEDGER
    ledger = open_for_reading(path)
    segments = Segments(folder / FOLDER, read_stamp(ledger, path).run)
    turns: dict[int, list[tuple[str, list[int], list[int]]]] = {}
    for session, state, ref in ledger.execute(
        "SELECT session, state, chunk FROM turns WHERE state != 'side' ORDER BY -id"
    ):
        [chunk] = decode_chunks(segments.read(*REF.unpack(ref)))
        turns.setdefault(session, []).append((state, chunk.context.tolist(), chunk.tokens.tolist()))
    ledger.close()
    return turns


@pytest.mark.slow  # test_live_kills.py has users of a run whose gateway and driver are killed
@pytest.mark.timeout(300)
def test_what_users_got_is_in_the_ledger_once_and_is_what_was_trained(launch: Launch, tmp_path: Path):
    key = add_key(tmp_path / "run.keys.json", "ann")
    port = held_port()
    run = launch(
        f"run.steps={STEPS}",
        f"rollout.batch_size={BATCH}",
        "live={}",
        f"gateway.port={port}",
        f"gateway.admin_port={held_port()}",
        by="serve",
    )
    users = asyncio.run(talk(run, f"http://127.0.0.1:{port}", key))
    run.process.send_signal(signal.SIGTERM)
    assert finish(run) == 0, run.output()
    run.assert_nothing_left()

    audit = audit_run(run.folder, print)
    assert audit.discrepancies == []
    assert (audit.steps, audit.turns["trained"]) == (STEPS, STEPS * BATCH)
    assert summary(run)["turns"]["trained"] == STEPS * BATCH
    assert summary(run)["tokens_generated"] > summary(run)["tokens_trained"] > 0

    turns, tokenizer = stored_turns(run.folder), build_tokenizer()
    assert len(users.answers) >= STEPS * BATCH
    for session, (problem, answer) in users.answers.items():
        (_, context, sampled), *others = turns.pop(session_of(named("ann"), named(session)))
        assert [state for state, _, _ in others] in ([], ["cancelled"]), "of the user's last words"
        assert context == tokenizer.encode(prompt_text(problem.prompt))
        assert tokenizer.decode(sampled, skip_special_tokens=True) == answer.text
        assert len(sampled) == LONGEST_ANSWER or sampled[-1] == IDS[EOS]
    # The rest was never answered to its end: users have left.
    assert {state for each in turns.values() for state, _, _ in each} <= {"cancelled", "waiting"}
    # The trainer has trained what the engines have sampled, and computes for it what they did.
    trained = [step for step in records(run) if "mismatch/logprob_abs_max" in step]
    assert trained and np.max([step["mismatch/logprob_abs_max"] for step in trained]) < 1e-4


def vote(messages: list[dict]) -> str:
    """Judge as the user says, and always have a hint."""
    if "[HINT_START]" in messages[0]["content"]:
        return r"\boxed{1} [HINT_START]add the two numbers[HINT_END]"
    after = messages[-1]["content"].rpartition("# What came after the reply")[2]
    return r"\boxed{1}" if THANKS in after else r"\boxed{-1}"


@pytest.mark.slow  # test_teacher.py has the policy as its teacher
@pytest.mark.timeout(300)
def test_votes_and_hints_of_a_server_and_the_policy_as_teacher_train(launch: Launch, tmp_path: Path):
    key = add_key(tmp_path / "run.keys.json", "ann")
    port, server = held_port(), ChatServer(vote)

    async def judged() -> LaunchedRun:
        async with server.serving() as url:
            judge = {
                "type": "model",
                "endpoint": {"type": "url", "url": url, "model": "judge"},
                "votes": 2,
                "hint": {"teacher": {"type": "policy"}},
            }
            run = launch(
                f"run.steps={STEPS}",
                f"rollout.batch_size={BATCH}",
                "live={}",
                f"judge={json.dumps(judge)}",
                "actor.advantage=[{type: reward}, {type: teacher}]",
                f"gateway.port={port}",
                f"gateway.admin_port={held_port()}",
                by="serve",
            )
            await talk(run, f"http://127.0.0.1:{port}", key)
            return run

    run = asyncio.run(judged())
    run.process.send_signal(signal.SIGTERM)
    assert finish(run) == 0, run.output()
    run.assert_nothing_left()

    audit = audit_run(run.folder, print)
    assert audit.discrepancies == []
    assert (audit.steps, audit.turns["trained"]) == (STEPS, STEPS * BATCH)
    steps = records(run)
    assert [step["advantage/teacher_fraction"] for step in steps] == [1.0] * STEPS
    assert all(step["advantage/teacher_abs_mean"] > 0 for step in steps), "a hint changes the probabilities"
    assert (
        {step["live/votes_missing"] for step in steps} == {step["live/votes_tied"] for step in steps} == {0}
    )
    asked = server.requests[0]["messages"][-1]["content"]
    assert "# Conversation before the reply" in asked


@pytest.mark.slow  # benchmarks/judges runs it for longer
@pytest.mark.timeout(300)
def test_a_judge_with_engines_of_its_own_votes_and_teaches_although_its_engine_dies(
    launch: Launch, inputs: Path, tmp_path: Path
):
    key, port = add_key(tmp_path / "run.keys.json", "ann"), held_port()
    score, hint = (
        {"prompt": "tests.runs.rewards.same_question", "parser": f"tests.runs.rewards.{parser}"}
        for parser in ("from_letters", "always_a_hint")
    )
    judge = {
        "type": "model",
        "endpoint": {"type": "engines", "path": str(inputs / "policy"), "dtype": "float32"},
        "max_new_tokens": LONGEST_ANSWER,
        "votes": 1,
        "ask_again_s": 1,
        "score": score,
        "hint": {"question": hint, "teacher": {"type": "judge"}},
    }
    run = launch(
        f"run.steps={STEPS}",
        f"rollout.batch_size={BATCH}",
        "live={}",
        f"judge={json.dumps(judge)}",
        "actor.advantage=[{type: reward}, {type: teacher}]",
        f"gateway.port={port}",
        f"gateway.admin_port={held_port()}",
        by="serve",
    )

    def killed_once() -> None:
        [server, *_] = run.pids_of("judge-engine-0")
        os.kill(server, signal.SIGKILL)

    asyncio.run(talk(run, f"http://127.0.0.1:{port}", key, after_a_step=killed_once))
    run.process.send_signal(signal.SIGTERM)
    assert finish(run) == 0, run.output()
    run.assert_nothing_left()

    assert "judge-engine-0 is started again" in run.output()
    audit = audit_run(run.folder, print)
    assert audit.discrepancies == []
    assert (audit.steps, audit.turns["trained"]) == (STEPS, STEPS * BATCH)
    assert summary(run)["engine_restarts"] == 0, "the policy's engine goes on"
    assert [step["advantage/teacher_fraction"] for step in records(run)] == [1.0] * STEPS
