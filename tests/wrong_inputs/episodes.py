"""Lets an episode fail in a real collector with real judge processes, and takes the message that the driver
gets.

Engines are a pure function: nothing else is stood in for.
"""

import asyncio
import os
from collections.abc import Awaitable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.configs.schema import PluginConfig, PromptFile, SamplingConfig
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.rollout.collection.collector.episodes import Episodes, check
from slipstream.rollout.collection.collector.groups import GroupCollector, NamedFilter, WholeGroups
from slipstream.rollout.collection.collector.judging import Judging, WorkflowReward
from slipstream.rollout.collection.collector.outbox import Outbox
from slipstream.rollout.collection.collector.recording import Recording
from slipstream.rollout.collection.messages import FAILED, Assignment
from slipstream.rollout.prompts import read_prompts
from slipstream.rollout.reward.judge.judge_errors import JudgeStartFailed
from slipstream.rollout.reward.judge.judge_pool import JudgePool
from slipstream.rollout.system import plugins
from slipstream.rollout.system.linux import children_of
from slipstream.rollout.system.time_limit import TimeLimit
from slipstream.rollout.tokens.trajectory import Prompt
from slipstream.rollout.workflow import WorkflowContext
from tests.unit.collecting import HoldingDriver, PureEngines
from tests.wrong_inputs.failing_episodes import FailingEpisode
from tests.wrong_inputs.inputs import Told
from tests.wrong_inputs.their_code import HERE

VOCABULARY = 48
SOUND = "slipstream.rollout.reward.FinalAnswer"
SAMPLING = SamplingConfig(max_new_tokens=8)


class EndpointOfNobody:
    """An endpoint that no agent reaches, because it fails before."""

    @asynccontextmanager
    async def open(self, **limits: object):
        async def run(work: Awaitable[object]) -> object:
            return await work

        yield SimpleNamespace(
            base_url="http://127.0.0.1:9", api_key="key", key_variables=(), limit=None, run=run
        )


def let_fail(case: FailingEpisode, folder: Path) -> Told:
    """Collect a group in ``folder``, which is made, and judge the message about it."""
    folder.mkdir()
    data = folder / "data.jsonl"
    data.write_text('{"prompt": "1+1=?", "label": "2"}\n\n\n{"prompt": "2+1=?", "label": "3", "level": 1}\n')
    prompt, children = read_prompts(PromptFile(data))[1], set(children_of(os.getpid()))
    message, problems = asyncio.run(_message(case, prompt, folder / "logs")), list[str]()
    says = [*case.says, *([f"prompt 1 ({data}, line 4)"] if case.starts else [])]
    problems += [f"lacks {words!r}" for words in says if words not in message]
    if set(children_of(os.getpid())) - children:
        problems.append("a process is left")
    return Told(message.replace(str(folder), "FOLDER").strip(), tuple(problems))


async def _message(case: FailingEpisode, prompt: Prompt, logs: Path) -> str:
    reward = f"{HERE}.{case.reward}" if case.reward else SOUND
    rollout = RolloutConfig.model_validate(
        {
            "max_head_offpolicyness": 0,
            "batch_size": 1,
            "n_samples_per_prompt": 2,
            "reward": reward,
            "workflow": {"path": case.workflow, "args": case.args},
            "episode_attempts": 1,
            "judging": {"timeout_s": 1.0, "attempts": 1, "retry_after_s": 0.01},
        }
    )
    pool = JudgePool(rollout.judging, PluginConfig(path=reward), logs, "test", reward_key=rollout.reward_key)
    try:
        async with asyncio.timeout(60), pool as judges:
            return await _collected(case, rollout, prompt, judges)
    except JudgeStartFailed as error:
        return str(error)


async def _collected(case: FailingEpisode, rollout: RolloutConfig, prompt: Prompt, judges: JudgePool) -> str:
    outbox, driver, engines = Outbox(), HoldingDriver(), PureEngines(chunk_s=0.01)
    tokenizer: Any = build_tokenizer()
    limit = TimeLimit(case.timeout_s, "rollout.episode_timeout_s")
    workflow = plugins.build(rollout.workflow)
    checking = partial(check, vocab_size=VOCABULARY, workflow=case.workflow)
    groups = GroupCollector(
        outbox=outbox,
        record=lambda group, assignment, sample, attempt: Recording(
            engines, outbox, group, assignment, sample, clock=asyncio.get_running_loop().time
        ),
        context=lambda record, _: WorkflowContext(
            record, tokenizer, WorkflowReward(judges, limit, record), SAMPLING, EndpointOfNobody()
        ),
        episodes=Episodes(
            workflow, rollout, checking, limit, outbox.attempt_failed, f"the workflow {case.workflow}"
        ),
        judge=Judging(judges, tokenizer),
        samples=2,
        group_filter=NamedFilter(case.filter, WholeGroups(plugins.resolve(case.filter)()))
        if case.filter
        else None,
    )
    async with driver.hearing(outbox):
        driver.assignments[0] = 1
        groups.start(Assignment(0, 1, 1, prompt, []), memoryview(b""))
        while len(groups):
            await asyncio.sleep(0.02)
        await groups.close()
    [(_, verdict, note)] = driver.verdicts
    return note if verdict == FAILED else f"the verdict {verdict}"
