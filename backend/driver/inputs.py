"""Reads the inputs of a run, so that everything wrong with them is found before anything is started."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar, cast

from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.hf.index import HfCheckpointError
from slipstream.bridge.model.spec import ModelSpec, value_spec
from slipstream.bridge.shards.check import check_tensors
from slipstream.configs.rules.models import CRITIC, JUDGE, OTHER_MODELS, model_folder
from slipstream.configs.schema import PluginConfig, RunConfig
from slipstream.configs.schema.judge import own_engines
from slipstream.rollout import plugins
from slipstream.rollout.compat.slime.checking import hook_problems
from slipstream.rollout.control.filters import GroupFilter
from slipstream.rollout.endpoint.needed import endpoint_problems
from slipstream.rollout.engine.model_limits import context_of, vocabulary_of
from slipstream.rollout.judge.named_model import judge_of_turns, named_model
from slipstream.rollout.prompts import PromptError, read_prompts
from slipstream.rollout.reward.loading import TURNS, check_judge, load_judge, wants_model
from slipstream.rollout.reward.model.judge_model import JudgeModel
from slipstream.rollout.tokenizer import HfTokenizer, load_tokenizer
from slipstream.rollout.trajectory import Prompt
from slipstream.rollout.workflow import Workflow

T = TypeVar("T")


class InputError(ValueError):
    """The inputs of a run cannot be used; the message lists every reason."""


@dataclass(frozen=True)
class Inputs:
    """Everything that a recipe names, read and constructed."""

    spec: ModelSpec
    tokenizer: HfTokenizer
    prompts: list[Prompt]
    held_out: list[Prompt]
    workflow: Workflow
    reward: object
    """The object that judges, or the function; None without prompts."""
    group_filter: GroupFilter | None


def read_inputs(config: RunConfig) -> Inputs:
    """Read and construct what the recipe names. Raises InputError with all problems at once."""
    problems: list[str] = []

    def attempt(name: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (UnsupportedModel, PromptError, plugins.PluginError, OSError, ValueError) as error:
            problems.append(f"{name}: {error}")
            return None

    def plugin(name: str, settings: PluginConfig | None) -> object:
        return attempt(name, lambda: plugins.build(settings)) if settings is not None else None

    rollout = config.rollout
    spec = attempt("model.path", lambda: model_spec(config.model.path))
    tokenizer = attempt("model.path", lambda: read_tokenizer(config, spec))
    prompts = attempt("data.path", lambda: _prompts(config))
    held_out = attempt("eval.path", lambda: _held_out(config))
    workflow = plugin("rollout.workflow", rollout.workflow)
    reward = attempt("rollout.reward", lambda: _reward(config))
    group_filter = plugin("rollout.group_filter", rollout.group_filter)
    problems += [
        *endpoint_problems(config),
        *hook_problems(config),
        *checkpoint_problems(config, OTHER_MODELS),
        *judge_model_problems(config),
    ]
    if problems or spec is None or tokenizer is None or prompts is None or held_out is None:
        raise InputError("\n".join(problems))
    return Inputs(
        spec=spec,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out=held_out,
        workflow=cast(Workflow, workflow),
        reward=reward,
        group_filter=cast(GroupFilter | None, group_filter),
    )


def plugin_problems(config: RunConfig) -> list[str]:
    """Return what is wrong with the code that the recipe names.

    Modules of the user are imported, and nothing in them is called.
    """
    rollout, problems = config.rollout, list[str]()

    def attempt(name: str, check: Callable[[], object]) -> None:
        try:
            check()
        except Exception as error:  # modules of the user are imported
            problems.append(f"{name}: {error}")

    if (reward := rollout.reward) is not None:
        attempt("rollout.reward", lambda: check_judge(reward.path, reward.args, model=_model(config)))
        attempt("judge", lambda: _check_model_is_asked(config, reward))
    if config.live is not None and config.live.train:
        attempt("judge", lambda: _check_judge_of_turns(config))
    attempt("rollout.workflow", lambda: _check_plugin(rollout.workflow))
    if (group_filter := rollout.group_filter) is not None:
        attempt("rollout.group_filter", lambda: _check_plugin(group_filter))
    return [*problems, *endpoint_problems(config)]


def _check_plugin(settings: PluginConfig) -> None:
    plugins.check_args(settings.path, plugins.resolve(settings.path), settings.args)


def checkpoint_problems(config: RunConfig, settings: Iterable[str]) -> list[str]:
    """Return what is wrong with HF checkpoints: tensors that do not fit their config.json.

    ``settings``: the settings that name checkpoints.
    """
    problems: list[str] = []
    for name in settings:
        if (path := model_folder(config, name)) is not None:
            try:
                spec = model_spec(path)
                check_tensors(value_spec(spec) if name == CRITIC else spec)
            except (UnsupportedModel, HfCheckpointError, OSError) as error:
                problems.append(f"{name}: {error}")
    return problems


def judge_model_problems(config: RunConfig) -> list[str]:
    """Return what is wrong with the model of the judge's own engines, as far as it is not in the weights."""
    engines = own_engines(config.judge)
    if engines is None:
        return []
    try:
        tokenizer, vocabulary = load_tokenizer(engines.path), vocabulary_of(engines.path)
        context_of(engines.path)
    except (OSError, ValueError) as error:
        return [f"{JUDGE}: {error}"]
    problems: list[str] = []
    if not tokenizer.chat_template:
        problems.append(f"{JUDGE}: the tokenizer has no chat template, which writes questions for the model")
    if len(tokenizer) > vocabulary:
        problems.append(
            f"{JUDGE}: the tokenizer has {len(tokenizer)} tokens, the model {vocabulary} (vocab_size in "
            "config.json)"
        )
    hint = config.judge.hint if config.judge.type == "model" else None
    teaches = hint is not None and hint.teacher is not None and hint.teacher.type == "judge"
    has_policy = (config.model.path / "config.json").exists()
    if teaches and has_policy and load_tokenizer(config.model.path).get_vocab() != tokenizer.get_vocab():
        problems.append(
            f"{JUDGE}: its tokenizer is not that of model.path, whose tokens it is to score "
            "(judge.hint.teacher)"
        )
    return problems


def read_tokenizer(config: RunConfig, spec: ModelSpec | None) -> HfTokenizer:
    """Return the checkpoint's tokenizer. Raises ValueError, OSError.

    A tokenizer with ids that the model does not have would end the engines.
    """
    tokenizer = load_tokenizer(config.model.path)
    if spec is not None and len(tokenizer) > spec.geometry.vocab:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {spec.geometry.vocab} "
            "(vocab_size in config.json)"
        )
    return tokenizer


def _reward(config: RunConfig) -> object:
    settings = config.rollout.reward
    return settings and load_judge(settings.path, settings.args, model=_model(config)).plugin


def _model(config: RunConfig) -> Callable[[], object] | None:
    """Return what makes the language model of the recipe; None: it names none."""
    setup = named_model(config)
    return setup and (lambda: JudgeModel.of(setup.settings, setup.policy))


def _check_judge_of_turns(config: RunConfig) -> None:
    judge = judge_of_turns(config.judge)
    check_judge(judge.path, judge.args, (TURNS,), _model(config))


def _check_model_is_asked(config: RunConfig, reward: PluginConfig) -> None:
    """Raise ValueError if only the reward could ask the model, and it does not."""
    judges_turns = config.live is not None and config.live.train
    if _model(config) and not judges_turns and not wants_model(plugins.resolve(reward.path)):
        raise ValueError(
            f"nobody asks the language model: rollout.reward, {reward.path}, has no parameter `judge_model`; "
            "leave the section out, or name a reward that asks, such as slipstream.rollout.reward.ModelVotes"
        )


def _prompts(config: RunConfig) -> list[Prompt]:
    return read_prompts(config.data.path) if config.data else []


def _held_out(config: RunConfig) -> list[Prompt]:
    return read_prompts(config.eval.path)[: config.eval.max_prompts] if config.eval else []
