"""``slipstream try``: a few real episodes of a recipe, to be read before a run is started."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from rich.console import Console, Group
from rich.markup import escape
from rich.text import Text

from slipstream.backend.commands.outcome import Failed, WrongInput
from slipstream.backend.commands.preflight import check_start
from slipstream.backend.commands.run import memory_lines
from slipstream.backend.driver.modes.tryout import evenly, tryout
from slipstream.backend.driver.start.inputs import InputError, Inputs
from slipstream.backend.driver.start.prepare import PrepareFailed
from slipstream.backend.monitor.tables import pairs_table
from slipstream.configs.schema import RunConfig, path_text
from slipstream.rollout.collection.collector.trial import TriedEpisode
from slipstream.rollout.engine.engine_pool import NoEngine
from slipstream.rollout.engine.server_process import EngineStartError
from slipstream.rollout.reward.judge.judge_errors import JudgeStartFailed
from slipstream.rollout.system.plugins import PluginError
from slipstream.rollout.tokens.named_numbers import by_name, mean
from slipstream.rollout.tokens.tokenizer import Tokenizer
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory

LONGEST_TEXT = 4000
"""Characters of a text that is printed. The middle of a longer one is left out."""


def try_recipe(config: RunConfig, number: int, *, as_json: bool = False) -> None:
    """Run ``number`` episodes of a recipe and print them. Nothing is written.

    Raises WrongInput when the inputs cannot be used, and Failed when an episode has failed or none could run.
    """
    if config.rollout.data_source is not None:
        raise WrongInput(
            f"rollout.data_source: found {config.rollout.data_source.path}, expected null: `try` takes "
            "prompts from a file; add rollout.data_source=null 'data={path: some.jsonl}'"
        )
    if config.data is None:
        raise WrongInput("data: expected prompts to try: the recipe has none")
    check_start(config)
    printed = Console(highlight=False, soft_wrap=True)
    status = Console(stderr=True, highlight=False)
    with told(config):
        episodes = asyncio.run(_run(config, number, printed, status, as_json=as_json))
    failed = [episode for episode in episodes if episode.has_failed]
    if failed:
        prompts = ", ".join(str(episode.prompt.id) for episode in failed)
        raise Failed(f"{len(failed)} of {len(episodes)} episodes have failed: prompts {prompts}")


@contextmanager
def told(config: RunConfig) -> Iterator[None]:
    """Raise what keeps episodes from running as WrongInput or Failed, with the settings that free memory."""
    try:
        yield
    except InputError as error:
        raise WrongInput(str(error)) from None
    except (EngineStartError, PrepareFailed, PluginError, JudgeStartFailed, NoEngine) as error:
        failure = f"{type(error).__name__}: {error}"
        raise Failed("\n".join([failure, *memory_lines(failure, config)])) from None


@contextmanager
def phases(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield what shows the user what is going on: in one line of a terminal, elsewhere in lines."""
    if not console.is_terminal:
        yield partial(console.print, markup=False, soft_wrap=True)
        return
    with console.status("") as spinner:
        yield lambda text: spinner.update(escape(text))


async def _run(
    config: RunConfig, number: int, printed: Console, status: Console, *, as_json: bool
) -> list[TriedEpisode]:
    episodes: list[TriedEpisode] = []
    with phases(status) as say:
        async with tryout(config, say) as tried:
            tokenizer = tried.inputs.tokenizer
            if not as_json:
                printed.print(facts(config, tried.inputs))
            say(f"running {number} episodes")
            async for episode in tried.episodes(evenly(tried.inputs.prompts, number)):
                episodes.append(episode)
                if not as_json:
                    printed.print(shown(episode, len(episodes), tokenizer))
            say("ending the engine")
    if as_json:
        print(json.dumps([plain(episode, tokenizer) for episode in episodes], ensure_ascii=False, indent=1))
    else:
        printed.print("\n".join(verdict(episodes, config.rollout.sampling.max_new_tokens)))
    return episodes


def facts(config: RunConfig, inputs: Inputs) -> object:
    """Return a table of what the episodes are made of."""
    rollout, sampling = config.rollout, config.rollout.sampling
    template = "the tokenizer's" if inputs.tokenizer.chat_template else "none: prompts must be texts"
    return pairs_table(
        str(config.run.name),
        {
            "model": f"{config.model.path}, {config.model.dtype}",
            "tokenizer": f"{len(inputs.tokenizer):,} tokens; chat template: {template}",
            "prompts": ", ".join(
                f"{len(source.prompts):,} in {path_text(file.path)}"
                for source, file in zip(inputs.prompts.sources, config.training_files, strict=True)
            ),
            "workflow": rollout.workflow.path,
            "reward": rollout.reward.path if rollout.reward is not None else "of the hooks",
            "sampling": f"temperature {sampling.temperature:g}, at most {sampling.max_new_tokens} new tokens",
        },
    )


@dataclass(frozen=True)
class EpisodePart:
    """A stretch of a trajectory's text."""

    text: str
    is_sampled: bool
    """True for what the policy has sampled; otherwise it is prompt or context."""


def parts_of(trajectory: Trajectory, tokenizer: Tokenizer) -> list[EpisodePart]:
    """Return the text of a trajectory in order, special tokens included."""
    parts: list[EpisodePart] = []
    start = 0
    for is_sampled, runs in groupby(trajectory.header.runs, key=lambda run: run[0] != UNSAMPLED):
        end = list(runs)[-1][2]
        ids = trajectory.tokens_T[start:end].tolist()
        parts.append(EpisodePart(tokenizer.decode(ids, skip_special_tokens=False), is_sampled))
        start = end
    return parts


def shown(episode: TriedEpisode, number: int, tokenizer: Tokenizer) -> Group:
    """Return an episode as the terminal shows it."""
    prompt, lines = episode.prompt, list[Text]()
    lines.append(
        Text(f"\nepisode {number}, prompt {prompt.id}", style="bold").append(_summary(episode), "none")
    )
    if prompt.label is not None:
        lines.append(Text(f"label: {_cut(str(prompt.label))}", style="dim"))
    trajectories = episode.trajectory.split() if episode.trajectory is not None else ()
    for trajectory in trajectories:
        if len(trajectories) > 1:
            lines.append(Text("a trajectory of it:", style="dim"))
        text = Text()
        for part in parts_of(trajectory, tokenizer):
            text.append(_cut(part.text), "" if part.is_sampled else "dim cyan")
        lines.append(text)
    for attempt, failure in enumerate(episode.failures, 1):
        lines.append(Text(f"failure {attempt}:", style="bold red"))
        lines.append(Text(failure, style="red"))
    return Group(*lines)


def _summary(episode: TriedEpisode) -> str:
    trajectory = episode.trajectory
    if trajectory is None:
        return f": failed in {episode.seconds:.1f} s"
    words = [f"{trajectory.response_length} tokens", str(trajectory.finish), f"{episode.seconds:.1f} s"]
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    parts = "".join(f", {name} {value:g}" for name, value in trajectory.reward_parts)
    metrics = "".join(f", {name} {value:g}" for name, value in trajectory.metrics)
    return f": {reward}{parts}; {', '.join(words)}{metrics}, judged in {episode.judging_s:.1f} s"


def verdict(episodes: Sequence[TriedEpisode], max_new_tokens: int) -> Iterator[str]:
    """Yield what a look at all episodes says."""
    whole = [e.trajectory for e in episodes if e.trajectory is not None and not e.has_failed]
    rewards = [trajectory.reward for trajectory in whole if trajectory.reward is not None]
    yield ""
    if rewards:
        yield (
            f"{len(rewards)} of {len(episodes)} episodes have a reward: {mean(rewards):.3g} on average, "
            f"{min(rewards):g} to {max(rewards):g}"
        )
    if len(rewards) > 1 and min(rewards) == max(rewards):
        yield "  all rewards are equal: if those of a group are, there is nothing to learn from it"
    for name, values in by_name(trajectory.metrics for trajectory in whole).items():
        yield f"  {name}: {mean(values):.3g} on average, {min(values):g} to {max(values):g}"
    cut = sum(trajectory.finish is Finish.LENGTH for trajectory in whole)
    if cut:
        yield f"  {cut} cut off at {max_new_tokens} tokens (rollout.sampling.max_new_tokens)"


def plain(episode: TriedEpisode, tokenizer: Tokenizer) -> dict[str, object]:
    """Return an episode for scripts."""
    trajectory = episode.trajectory
    fields: dict[str, object] = {
        "prompt": episode.prompt.id,
        "label": episode.prompt.label,
        "reward": None,
        "failures": list(episode.failures),
        "seconds": round(episode.seconds, 3),
        "judging_s": round(episode.judging_s, 3),
    }
    if trajectory is None:
        return fields
    return fields | {
        "reward": trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
        "metrics": dict(trajectory.metrics),
        "finish": str(trajectory.finish),
        "response_length": trajectory.response_length,
        "trajectories": [
            [{"text": part.text, "sampled": part.is_sampled} for part in parts_of(each, tokenizer)]
            for each in trajectory.split()
        ],
    }


def _cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - LONGEST_TEXT:,} characters ...]\n{text[-half:]}"
