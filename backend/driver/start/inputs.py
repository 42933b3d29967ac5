"""Reads the inputs of a run, so that everything wrong with them is found before anything is started."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from slipstream.backend.driver.start.data_checks import (
    prompt_checks,
    template_file_problems,
    template_problems,
    writes_prompts,
)
from slipstream.backend.driver.start.engine_model import engine_problems
from slipstream.backend.driver.start.length_filter import LengthFilter
from slipstream.backend.driver.start.plugin_checks import model_of
from slipstream.backend.driver.start.plugin_process import imported_plugin_problems
from slipstream.backend.trainer.engine_checkpoint import EngineCheckpoint, engine_model_of
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.config import UnsupportedModel, read_config
from slipstream.bridge.hf.index import HfCheckpointError
from slipstream.bridge.hf.peft_config import PeftError, PeftIndex
from slipstream.bridge.model.spec import ModelSpec, value_spec
from slipstream.bridge.shards.adapter import NoAdapter, adapter_spec, check_peft
from slipstream.bridge.shards.check import check_tensors
from slipstream.configs.installed import untested_notes
from slipstream.configs.installed.environment import has_gpus
from slipstream.configs.rules.models import CRITIC, JUDGE, OTHER_MODELS, model_folder
from slipstream.configs.rules.parsers import TOOL_USE
from slipstream.configs.schema import ModelConfig, PluginConfig, PromptFile, RunConfig, is_on_hub, path_text
from slipstream.configs.schema.judge import own_engines
from slipstream.rollout.compat.hooks import hook_problems
from slipstream.rollout.control.filters import GroupFilter
from slipstream.rollout.engine.context import served_length
from slipstream.rollout.engine.model_limits import UNSERVED_ON_CPUS, context_of, vocabulary_of
from slipstream.rollout.prompts import (
    Check,
    PromptError,
    PromptSet,
    SourcePrompts,
    StoredPrompts,
    checked_prompts,
)
from slipstream.rollout.reward.loading import load_judge
from slipstream.rollout.system import plugins
from slipstream.rollout.tokens.tokenizer import HfTokenizer, load_tokenizer
from slipstream.rollout.tokens.trajectory import Messages, Prompt
from slipstream.rollout.workflow import Workflow
from slipstream.rollout.workflow.environment.tools import answer_message, ways_to_write

T = TypeVar("T")


class InputError(ValueError):
    """The inputs of a run cannot be used; the message lists every reason."""


@dataclass(frozen=True)
class Inputs:
    """Everything that a recipe names, read and constructed."""

    spec: ModelSpec
    engine_model: EngineCheckpoint
    tokenizer: HfTokenizer
    prompts: PromptSet
    held_out: list[Prompt]
    workflow: Workflow
    reward: object
    """The object that judges, or the function; None without prompts."""
    group_filter: GroupFilter | None
    notes: Sequence[str] = ()
    """Messages for the user about prompts that are left out."""
    left_out: int = 0
    """Number of prompts that are too long."""


def read_inputs(config: RunConfig, *, trains: bool = True) -> Inputs:
    """Read and construct what the recipe names. Raises InputError with all problems at once.

    ``trains``: there is a trainer, from which engines get the policy.
    """
    rollout, problems = config.rollout, imported_plugin_problems(config)

    def attempt(name: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (UnsupportedModel, PromptError, plugins.PluginError, OSError, ValueError) as error:
            problems.extend(f"{name}: {line}" for line in str(error).splitlines())
        except Exception as error:  # code of the user's
            problems.append(f"{name}: {plugins.raised(error)}")
        return None

    def plugin(name: str, settings: PluginConfig | None) -> object:
        return attempt(name, lambda: plugins.build(settings)) if settings is not None else None

    workflow = reward = group_filter = None
    if not problems:  # what cannot be imported is not tried again here
        workflow = plugin("rollout.workflow", rollout.workflow)
        reward = attempt("rollout.reward", lambda: _reward(config))
        group_filter = plugin("rollout.group_filter", rollout.group_filter)
    spec = attempt(
        "model.path", lambda: model_spec(config.model.path, plugins.resolved(config.model.families))
    )
    if spec is not None:
        problems += adapter_problems(config, spec)
    if not trains and config.actor.lora is not None and config.actor.lora.path is not None:
        problems.append(
            "actor.lora.path: without a trainer the engines would serve model.path without this adapter; "
            "merge it into a model (PEFT's merge_and_unload), name that as model.path, and leave this "
            "setting out"
        )
    tokenizer = attempt("model.path", lambda: read_tokenizer(config.model, spec))
    if tokenizer is not None:
        problems += tokenizer_problems(config, tokenizer)
    quantization = rollout.engine.quantization
    engine_model = spec and attempt(
        "model.path", lambda: engine_model_of(config.model, quantization, config.run.folder, spec)
    )
    problems += engine_problems(config, spec) if spec is not None else []
    context = spec and served_length(spec.geometry.max_positions, rollout.engine.args)
    sets = {"data": list[SourcePrompts](), "eval": list[SourcePrompts]()}
    for each in named_files(config):
        sources = sets[each.file.setting.partition(".")[0]]
        first = sum(len(source.prompts) + source.left_out for source in sources)
        read = partial(read_source, each, tokenizer, context, first)
        if (source := attempt(each.file.setting, read)) is not None:
            sources.append(source)
    problems += [
        *hook_problems(config),
        *checkpoint_problems(config, OTHER_MODELS),
        *cpu_engine_problems(config),
        *judge_model_problems(config),
    ]
    if problems or spec is None or engine_model is None or tokenizer is None:
        raise InputError("\n".join(dict.fromkeys(problems)))
    return Inputs(
        spec=spec,
        engine_model=engine_model,
        tokenizer=tokenizer,
        prompts=PromptSet(sets["data"]),
        held_out=[
            prompt
            for source in sets["eval"]
            for prompt in source.prompts[: config.eval and config.eval.max_prompts]
        ],
        workflow=cast(Workflow, workflow),
        reward=reward,
        group_filter=cast(GroupFilter | None, group_filter),
        notes=[
            *(f"model.path: {note}" for note in spec.notes),
            *untested_notes(config),
            *(source.note for sources in sets.values() for source in sources if source.note),
        ],
        left_out=sum(source.left_out for sources in sets.values() for source in sources),
    )


@dataclass(frozen=True)
class NamedFile:
    """A prompt file that a recipe names, and the room for its prompts."""

    file: PromptFile
    config: RunConfig
    new_tokens: int
    new_tokens_setting: str
    most_tokens: int | None
    most_tokens_setting: str

    def checks(self, tokenizer: HfTokenizer | None, context: int | None) -> list[Check]:
        """Return the checks of its rows."""
        return prompt_checks(self.config, tokenizer, context, self.new_tokens, self.new_tokens_setting)

    def filter(self, tokenizer: HfTokenizer | None) -> LengthFilter | None:
        """Return the filter that leaves out its long prompts; None: all are kept."""
        if self.most_tokens is None or tokenizer is None or not tokenizer.chat_template:
            return None
        return LengthFilter(tokenizer, self.most_tokens)

    def note(self, left_out: int, kept: int) -> str:
        """Return how many prompts are left out, for the user. Raises PromptError when there is no other."""
        text = f"{left_out:,} of {left_out + kept:,} prompts have more than {self.most_tokens:,} tokens"
        if not kept:
            raise PromptError(
                f"{path_text(self.file.path)}: {text} ({self.most_tokens_setting}): none is left"
            )
        return f"{self.file.setting}: {text} ({self.most_tokens_setting}) and are left out"


def named_files(config: RunConfig) -> list[NamedFile]:
    """Return the prompt files that a recipe names, those to train on first."""
    files, setting = list[NamedFile](), "rollout.sampling.max_new_tokens"
    most = config.rollout.sampling.max_new_tokens
    if config.data is not None:
        longest = config.data.max_prompt_tokens, "data.max_prompt_tokens"
        files += [NamedFile(file, config, most, setting, *longest) for file in config.training_files]
    if config.eval is not None:
        own = config.eval.sampling.max_new_tokens
        setting = setting if own is None else "eval.sampling.max_new_tokens"
        longest = config.eval.max_prompt_tokens, "eval.max_prompt_tokens"
        files += [NamedFile(file, config, own or most, setting, *longest) for file in config.held_out_files]
    return files


def read_source(
    named: NamedFile, tokenizer: HfTokenizer | None, context: int | None, first: int
) -> SourcePrompts:
    """Read a prompt file. ``first``: number of its first prompt. Raises PromptError and OSError."""
    file, keeps = named.file, named.filter(tokenizer)
    checks = named.checks(tokenizer, context)
    prompts = StoredPrompts(checked_prompts(file, checks, first=first, keeps=keeps))
    left_out = 0 if keeps is None else keeps.left_out
    note = named.note(left_out, len(prompts)) if left_out else ""
    return SourcePrompts(prompts, file.name, file.weight, left_out, note)


def data_problems(
    named: NamedFile,
    tokenizer: HfTokenizer | None,
    context: int | None,
    see: Callable[[Prompt], None],
) -> tuple[list[str], list[str]]:
    """Return what is wrong with a prompt file, each with its setting, and notes. Nothing of it is kept.

    ``see``: is called with each prompt that nothing is wrong with.
    """
    keeps, kept, notes = named.filter(tokenizer), 0, list[str]()
    prompts = checked_prompts(named.file, named.checks(tokenizer, context), keeps=keeps)

    def counted() -> Iterator[Prompt]:
        nonlocal kept
        for prompt in prompts:
            kept += 1
            see(prompt)
            yield prompt
        if keeps is not None and keeps.left_out:
            notes.append(named.note(keeps.left_out, kept))

    return problems_in(named.file.setting, counted()), notes


def problems_in(setting: str, rows: Iterable[object]) -> list[str]:
    """Return what is wrong with a file that is read, each with its setting. Nothing of it is kept."""
    try:
        for _ in rows:
            pass
    except PromptError as error:
        return [f"{setting}: {line}" for line in str(error).splitlines()]
    except OSError as error:
        return [f"{setting}: {error.filename or 'the file'} cannot be read: {error.strerror or error}"]
    return []


def tokenizer_problems(config: RunConfig, tokenizer: HfTokenizer) -> list[str]:
    """Return what is wrong with the chat templates that the recipe uses."""
    own = template_problems(tokenizer) if writes_prompts(config) and named_files(config) else []
    return [
        *(f"model.path: {reason}" for reason in own),
        *([] if own else tool_problems(config, tokenizer)),
        *template_file_problems(config, tokenizer),
    ]


def checkpoint_problems(config: RunConfig, settings: Iterable[str]) -> list[str]:
    """Return what is wrong with HF checkpoints: tensors that do not fit their config.json.

    ``settings``: the settings that name checkpoints.
    """
    problems: list[str] = []
    for name in settings:
        path = model_folder(config, name)
        if path is not None and not is_on_hub(path):  # a model that is not downloaded yet
            try:
                spec = model_spec(path, plugins.resolved(config.model.families))
                check_tensors(value_spec(spec) if name == CRITIC else spec)
            except (UnsupportedModel, HfCheckpointError, plugins.PluginError, OSError) as error:
                problems.append(f"{name}: {error}")
            except Exception as error:
                if not config.model.families:
                    raise
                problems.append(f"model.families: {plugins.raised(error)}")
    return problems


def adapter_problems(config: RunConfig, spec: ModelSpec) -> list[str]:
    """Return what is wrong with the adapter, as far as it is not in the values with which training begins."""
    lora = config.actor.lora
    if lora is None:
        return []
    try:
        adapter = adapter_spec(spec, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
    except NoAdapter as error:
        return [f"actor.lora.targets: {error}"]
    if lora.path is None or is_on_hub(lora.path):
        return []
    try:
        check_peft(PeftIndex(lora.path), adapter)
    except (PeftError, OSError) as error:
        return [f"actor.lora.path: {error}"]
    return []


def cpu_engine_problems(config: RunConfig) -> list[str]:
    """Return why engines on CPUs cannot serve the policy, if they are on CPUs."""
    device = config.cluster.device
    if device == "gpu" or (device == "auto" and has_gpus()):
        return []
    try:
        kind = read_config(config.model.path).get("model_type")
    except UnsupportedModel:
        return []  # which is reported as such
    reason = UNSERVED_ON_CPUS.get(kind) if isinstance(kind, str) else None
    if reason is None:
        return []
    return [f"model.path: SGLang cannot serve {kind} on CPUs: {reason}; run it on GPUs (cluster.device)"]


def judge_model_problems(config: RunConfig) -> list[str]:
    """Return what is wrong with the model of the judge's own engines, as far as it is not in the weights."""
    engines = own_engines(config.judge)
    if engines is None or is_on_hub(engines.path):
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


def read_tokenizer(model: ModelConfig, spec: ModelSpec | None) -> HfTokenizer:
    """Return the tokenizer of the policy. Raises ValueError, OSError.

    A tokenizer with ids that the model does not have would end the engines.
    """
    folder = model.path
    tokenizer = load_tokenizer(folder, model.template_args)
    if spec is not None and len(tokenizer) > spec.geometry.vocab:
        raise ValueError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens, the model {spec.geometry.vocab} "
            "(vocab_size in config.json); expected the tokenizer of this model"
        )
    if cast(object, tokenizer.eos_token_id) is None:
        raise ValueError(
            f"the tokenizer in {folder} has no end token; expected `eos_token` in tokenizer_config.json"
        )
    return tokenizer


def _reward(config: RunConfig) -> object:
    settings = config.rollout.reward
    return settings and load_judge(settings.path, settings.args, model=model_of(config)).plugin


_TOOL, _RESULTS = "look_up_wind", ("Calm-37", "Gale-52")
_PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
_SCHEMA = {
    "type": "function",
    "function": {"name": _TOOL, "description": "Return the wind.", "parameters": _PARAMETERS},
}
_RAISES = "raises"
_IDS = ("call00001", "call00002")
_CALL = {"type": "function", "function": {"name": _TOOL, "arguments": {"place": "Oslo"}}}
_ANSWERS = [answer_message("", "", [{"id": number, **_CALL}]) for number in _IDS]


def tool_problems(config: RunConfig, tokenizer: HfTokenizer) -> list[str]:
    """Return why the model's chat template cannot write conversations with tools, if the recipe has them.

    A template may leave out what it does not know: then the policy reads no tools, or no results, and nothing
    is said. One conversation with every kind of message is written, in each way in which ``ToolUse`` does it.
    """
    workflow = config.rollout.workflow
    if config.rollout.hooks is not None or workflow.path not in TOOL_USE or not tokenizer.chat_template:
        return []
    answers = zip(*(ways_to_write(answer, "A call.") for answer in _ANSWERS), strict=True)
    problems = [_problem(tokenizer, workflow.args, way) for way in answers]
    if None in problems:
        return []
    # What is left out says more than what is raised for another way of writing the calls.
    problem = next((each for each in problems if each and not each.startswith(_RAISES)), problems[0])
    return [
        f"rollout.workflow: ToolUse cannot be used with the chat template of {config.model.path}, which "
        f"{problem}; expected one that writes `tools`, calls and messages of the role `tool`: take a model "
        "that was trained with tools, or put such a chat_template.jinja beside its tokenizer"
    ]


def _problem(
    tokenizer: HfTokenizer, args: Mapping[str, object], answers: Sequence[dict[str, Any]]
) -> str | None:
    """Return what a template does wrong with a conversation with these answers."""
    own, system = args.get("template"), args.get("system")
    settings = cast("Mapping[str, object]", own) if isinstance(own, dict) else {}

    def written(messages: Messages) -> str:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **{"tools": [_SCHEMA], **settings}
        )

    begun: Messages = [] if system is None else [{"role": "system", "content": system}]
    begun.append({"role": "user", "content": "Is there wind?"})
    try:
        first, last = written(begun), written([*begun, *_rounds(answers)])
    except Exception as error:  # the template is code of the model's
        return f"{_RAISES} {type(error).__name__}: {error}"
    if not all(result in last for result in _RESULTS):
        return "leaves out the results of tools"
    if _TOOL not in first and system is None and not settings:
        return "leaves out the tools, which no `system` message of the workflow describes"
    return None


def _rounds(answers: Sequence[dict[str, Any]]) -> Messages:
    """Return answers with the results of their calls."""
    rounds: Messages = []
    for number, answer, result in zip(_IDS, answers, _RESULTS, strict=True):
        rounds += [answer, {"role": "tool", "tool_call_id": number, "name": _TOOL, "content": result}]
    return rounds
