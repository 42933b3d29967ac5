"""``slipstream eval``: what a checkpoint gets on sets of prompts, by a recipe's workflow and reward."""

import asyncio
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from slipstream.backend.commands.outcome import Failed, WrongInput
from slipstream.backend.commands.preflight import check_start
from slipstream.backend.commands.tryout import phases, told
from slipstream.backend.driver.modes.tryout import tryout
from slipstream.backend.driver.start.hub_models import with_local_models
from slipstream.backend.driver.start.length_filter import LengthFilter
from slipstream.backend.monitor.passes import by_prompt, passes, powers_to
from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.configs.schema import EvalConfig, EvalSamplingConfig, PromptFile, RunConfig
from slipstream.configs.schema.data import how_held_out
from slipstream.rollout.collection.collector.trial import TriedEpisode
from slipstream.rollout.prompts import PromptError, checked_prompts
from slipstream.rollout.tokens.evaluated_set import HELD_OUT
from slipstream.rollout.tokens.named_numbers import mean
from slipstream.rollout.tokens.tokenizer import load_tokenizer
from slipstream.rollout.tokens.trajectory import Finish, Prompt

SHOWN_FAILURES = 3
"""Failed episodes of which the reason is printed."""


@dataclass(frozen=True)
class SetScore:
    """The score of a checkpoint on one set."""

    name: str
    prompts: int
    samples: int
    """Of each prompt."""
    mean: float
    """Mean reward over all samples: ``avg@k``."""
    error: float
    """Standard error of the mean, with prompts as the units that differ."""
    passes: Mapping[int, float]
    """``pass@k`` by k: the chance that at least one of k samples passes."""
    length: float
    """Mean number of sampled tokens."""
    cut_off: float
    """Share of the samples that ended at the limit of tokens."""


def prompt_sets(config: RunConfig, named: Sequence[str]) -> dict[str, list[Prompt]]:
    """Return the prompts of each set by its name. ``named``: NAME=FILE; none: the recipe's held-out prompts.

    A named file is read as held-out prompts are. Raises WrongInput with everything that is wrong.
    """
    files: dict[str, PromptFile] = {}
    columns, template = how_held_out(config.eval, config.data)
    problems: list[str] = []
    for each in named:
        name, equals, path = each.partition("=")
        if not (equals and name and path):
            problems.append(f"--set {each}: expected NAME=FILE")
        elif name in files:
            problems.append(f"--set {each}: there is a set {name} already: give it another name")
        else:
            files[name] = PromptFile(Path(path), columns, template)
    if not named:
        files = {file.name or HELD_OUT: file for file in config.held_out_files}
    if not named and not files:
        problems.append("--set: expected NAME=FILE, because the recipe has no eval.path")
    sets: dict[str, list[Prompt]] = {}
    most = config.eval and config.eval.max_prompt_tokens
    keeps = (
        LengthFilter(load_tokenizer(config.model.path, config.model.template_args), most) if most else None
    )
    for name, file in files.items():
        try:
            sets[name] = list(checked_prompts(file, keeps=keeps))
        except PromptError as error:
            problems.append(f"--set {name}: {error}")
        except OSError as error:
            problems.append(f"--set {name}: {file.path} cannot be read: {error.strerror or error}")
    if problems:
        raise WrongInput("\n".join(problems))
    return sets


def with_checkpoint(config: RunConfig) -> RunConfig:
    """Return the recipe with its models of the hub on this machine. Raises WrongInput and Failed."""
    with told(config), phases(Console(stderr=True)) as say:
        return asyncio.run(with_local_models(config, say))


def evaluate(
    config: RunConfig,
    sets: Mapping[str, Sequence[Prompt]],
    samples: int,
    temperature: float,
    *,
    as_json: bool = False,
) -> None:
    """Evaluate ``config.model`` and print a table, or one JSON document.

    Raises WrongInput when the inputs cannot be used, and Failed when an episode has none of what it needs.
    """
    if not math.isfinite(temperature):
        raise WrongInput(f"--temperature {temperature}: expected a finite number, such as 1")
    if samples > 1 and temperature == 0:
        raise WrongInput(
            f"--samples {samples} with --temperature 0: all samples of a prompt would be equal; expected a "
            "temperature above 0, such as 1"
        )
    check_start(config)
    with told(config):
        scores = asyncio.run(_evaluate(with_sampling(config, temperature), sets, samples))
    if as_json:
        json.dump({score.name: _plain(score) for score in scores}, sys.stdout, indent=1)
        print()
    else:
        table_console().print(rows_table(str(config.model.path), scores, columns(samples)))


def with_sampling(config: RunConfig, temperature: float) -> RunConfig:
    """Return the recipe with the sampling of its evaluations, and without what only training reads."""
    own = (config.eval.sampling if config.eval is not None else EvalSamplingConfig()).model_copy(
        update={"temperature": temperature}
    )
    rollout = config.rollout.model_copy(update={"sampling": own.over(config.rollout.sampling)})
    # The checkpoint of a run holds its adapter, merged into the weights.
    actor = config.actor.model_copy(update={"lora": None})
    evaluation = EvalConfig(sampling=own)  # without prompts: the command has read them
    return config.model_copy(update={"rollout": rollout, "data": None, "eval": evaluation, "actor": actor})


async def _evaluate(config: RunConfig, sets: Mapping[str, Sequence[Prompt]], samples: int) -> list[SetScore]:
    scores: list[SetScore] = []
    status = Console(stderr=True, highlight=False)
    with phases(status) as say:
        async with tryout(config, say, evaluates=True) as tried:
            for name, prompts in sets.items():
                total, episodes = len(prompts) * samples, list[TriedEpisode]()
                asked = [prompt for prompt in prompts for _ in range(samples)]
                async for episode in tried.episodes(asked):
                    episodes.append(episode)
                    if status.is_terminal:
                        say(f"{name}: {len(episodes):,} of {total:,} episodes")
                scores.append(score_of(name, episodes, samples))
            say("ending the engine")
    return scores


def score_of(name: str, episodes: Sequence[TriedEpisode], samples: int) -> SetScore:
    """Return the score of a set. ``episodes``: ``samples`` of each prompt in a row.

    Raises Failed when an episode has no reward: a mean over the others would be of easier prompts.
    """
    failed = [episode for episode in episodes if episode.has_failed]
    if failed:
        reasons = [f"prompt {each.prompt.id}: {each.failures[-1]}" for each in failed[:SHOWN_FAILURES]]
        raise Failed("\n".join([f"{name}: {len(failed)} of {len(episodes)} episodes have failed", *reasons]))
    whole = [episode.trajectory for episode in episodes if episode.trajectory is not None]
    rewards = [trajectory.reward or 0.0 for trajectory in whole]
    means = [mean(values) for values in by_prompt(rewards, samples)]
    count = len(means)
    middle = mean(means)
    spread = math.sqrt(sum((value - middle) ** 2 for value in means) / max(1, count - 1))
    return SetScore(
        name,
        count,
        samples,
        middle,
        spread / math.sqrt(count),
        passes(rewards, samples),
        mean([trajectory.header.sampled_length for trajectory in whole]),
        mean([float(trajectory.finish is Finish.LENGTH) for trajectory in whole]),
    )


def columns(samples: int) -> Columns[SetScore]:
    """Return the columns of the table."""
    pass_columns = {f"pass@{k}": (lambda row, k=k: f"{row.passes[k]:.3f}") for k in powers_to(samples)}
    return {
        "set": lambda row: row.name,
        "prompts": lambda row: f"{row.prompts:,}",
        f"avg@{samples}": lambda row: f"{row.mean:.3f} ± {row.error:.3f}",
        **pass_columns,
        "tokens": lambda row: f"{row.length:.0f}",
        "cut off": lambda row: f"{row.cut_off:.1%}",
    }


def _plain(score: SetScore) -> dict[str, object]:
    return {
        "prompts": score.prompts,
        "samples": score.samples,
        f"avg@{score.samples}": score.mean,
        "standard_error": score.error,
        **{f"pass@{k}": value for k, value in score.passes.items()},
        "tokens": score.length,
        "cut_off": score.cut_off,
    }
