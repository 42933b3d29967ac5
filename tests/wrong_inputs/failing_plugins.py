"""What plug-ins of ranks and data sources can return or raise: each is named, with its file and line."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.backend.batch.micro_batch import assemble
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.objective.losses import Tokens
from slipstream.backend.trainer.plugins import RankPlugins
from slipstream.backend.trainer.prepared import Scores
from slipstream.configs.schema import RunConfig
from slipstream.rollout.prompts.sources.drawn_prompts import SourceRequest
from slipstream.rollout.prompts.sources.source_process import OwnSource, _Positions
from slipstream.rollout.system.plugins import PluginFailed
from slipstream.rollout.system.programs.hook_process import WrongAnswer
from slipstream.rollout.tokens.trajectory import Completion, Finish, Span, Trajectory, TrajectoryBuilder
from tests.wrong_inputs import their_plugins
from tests.wrong_inputs.their_plugins import HERE


@dataclass(frozen=True)
class FailingPlugin:
    """A wrong class, and the words of the message about it."""

    name: str
    setting: str
    says: tuple[str, ...]


CASES = (
    FailingPlugin(
        "Scalar",
        "actor.objective",
        ("shape []", "a tensor of torch.float32, of shape [3]", "averaging"),
    ),
    FailingPlugin("Half", "actor.objective", ("torch.bfloat16", "expected a tensor of torch.float32")),
    FailingPlugin("NotANumber", "actor.objective", ("returned nan for token 0 of 3", "expected finite")),
    FailingPlugin("Detached", "actor.objective", ("without a gradient", "tokens.logp_M")),
    FailingPlugin("Nothing", "actor.objective", ("returned None", "expected a tensor")),
    FailingPlugin("Misspelt", "actor.objective", ("AttributeError", "no attribute 'logp'")),
    FailingPlugin("ClippedAsNumbers", "actor.objective", ("`clipped_T`", "expected a tensor of torch.bool")),
    FailingPlugin("OfTrajectories", "actor.advantage", ("shape [4]", "expected", "shape [6]")),
    FailingPlugin("OfWholeNumbers", "actor.advantage", ("torch.int64", "expected", "floating-point")),
    FailingPlugin("Infinite", "actor.advantage", ("returned inf for token 0", "expected finite numbers")),
    FailingPlugin("Mean", "actor.kl.penalty", ("shape []", "expected", "shape [3]")),
    FailingPlugin("OfProbabilities", "actor.kl.penalty", ("returned nan", "expected finite numbers")),
    FailingPlugin("Changing", "actor.transforms[0]", ("FrozenInstanceError", "reward")),
    FailingPlugin("Trajectories", "actor.transforms[0]", ("returned a tuple", "expected a TrainBatch")),
    FailingPlugin("Shortened", "actor.transforms[0]", ("`group_N` of 4", "expected 2", "batch.keeping")),
    FailingPlugin("NoneLeft", "actor.transforms[0]", ("0 episodes", "expected at least 1", "keep more")),
    FailingPlugin("BadReward", "actor.transforms[0]", ("the reward nan of trajectory 0", "finite number")),
    FailingPlugin("Later", "actor.transforms[0]", ("version 1, expected 0", "leave `version`")),
    FailingPlugin("AllLoss", "actor.transforms[0]", ("cannot be trained", "no policy version sampled")),
    FailingPlugin("Text", "actor.metrics[0]", ("a str as 'note'", "expected a finite number")),
    FailingPlugin("Listed", "actor.metrics[0]", ("returned a list", "expected numbers by name")),
    FailingPlugin("Spaced", "actor.metrics[0]", ("the name 'two words'", "without spaces")),
    FailingPlugin("DividedByZero", "actor.metrics[0]", ("ZeroDivisionError",)),
    FailingPlugin("Empty", "rollout.data_source", ("returned 0 rows", "expected 1 to 4", "begin again")),
    FailingPlugin("TooMany", "rollout.data_source", ("returned 5 rows", "expected 1 to 4")),
    FailingPlugin("Unasked", "rollout.data_source", ("position 0", "'question'", "expected a mapping")),
    FailingPlugin("Opened", "rollout.data_source", ("position 0", "cannot be written down")),
    FailingPlugin("Unreachable", "rollout.data_source", ("ConnectionError: no route to the store",)),
)


def settings(setting: str, path: str) -> dict[str, Any]:
    """Return the actor section of a recipe that names ``path``."""
    section = setting.removeprefix("actor.")
    if section == "objective":
        return {"objective": {"type": "plugin", "path": path}}
    if section == "advantage":
        return {"advantage": [{"type": "plugin", "path": path}]}
    if section == "kl.penalty":
        return {"kl": {"penalty": path}}
    return {section.removesuffix("[0]"): [path]}


def config_of(actor: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "test", "steps": 1},
            "model": {"path": "unused"},
            "data": {"path": "unused.jsonl"},
            "actor": actor,
            "rollout": {"max_head_offpolicyness": 2, "batch_size": 2, "n_samples_per_prompt": 2},
        }
    )


def sampled(reward: float, tokens: int = 3) -> Trajectory:
    builder = TrajectoryBuilder([1, 2])
    ids = tuple(range(tokens))
    builder.add_completion(Completion(ids, (-1.0,) * tokens, (Span(0, 0, tokens),), Finish.STOP))
    return builder.build().judged(reward)


def batch() -> TrainBatch:
    """Return two groups of two trajectories of three tokens."""
    return TrainBatch(0, tuple(map(sampled, (1.0, 0.0, 1.0, 0.5))), np.array([0, 0, 1, 1]))


def tokens(n: int = 3) -> Tokens:
    logp_M = torch.full((n,), -1.0, requires_grad=True)
    minus_M = torch.full((n,), -1.5)
    owner_M = torch.zeros(n, dtype=torch.int64)
    return Tokens(logp_M, minus_M, minus_M, torch.ones(n), owner_M.int(), owner_M, 1)


def plugins_of(actor: dict[str, Any]) -> RankPlugins:
    config = config_of(actor)
    return RankPlugins(config.actor, config.rollout.max_head_offpolicyness)


def let_fail(case: FailingPlugin) -> str:
    """Return the message about a wrong class. Raises AssertionError if there is none."""
    path = f"{HERE}.{case.name}"
    try:
        if case.setting == "rollout.data_source":
            _Positions(OwnSource(path, {}, 0)).answer(SourceRequest(draw=4))
            raise AssertionError("no error")
        plugins, x = plugins_of(settings(case.setting, path)), tokens()
        micro = assemble(batch(), [0, 1])
        if plugins.objective is not None:
            plugins.objective(x, x.behaviour_logp_M)
        if plugins.penalty is not None:
            plugins.penalty(x.logp_M, x.behaviour_logp_M)
        plugins.term(batch(), micro, Scores(None, None, None, None))
        plugins.measured(plugins.transformed(batch()), {})
    except (PluginFailed, WrongAnswer) as error:
        return str(error)
    raise AssertionError("no error")


def problems_of(case: FailingPlugin, message: str) -> list[str]:
    """Return what a message lacks: the setting, the class, its file and a line of the method, the words."""
    cls = getattr(their_plugins, case.name)
    lines, first = inspect.getsourcelines(cls)
    places = [f"{Path(inspect.getsourcefile(cls)).name}:{first + n}" for n in range(1, len(lines))]
    expected = [case.setting, f"{HERE}.{case.name}", *case.says]
    lacking = [words for words in expected if words not in message]
    return lacking + ([] if any(place in message for place in places) else ["file and line"])
