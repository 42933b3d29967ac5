"""Rules about files and packages that the recipe names, and about the run folder."""

import importlib.util
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from slipstream.configs.published import download_command, repositories
from slipstream.configs.rules.models import (
    JUDGE,
    MODELS,
    OTHER_MODELS,
    POLICY,
    model_config,
    model_folder,
    model_number,
)
from slipstream.configs.rules.rule import Rule, setting
from slipstream.configs.schema import DataConfig, EvalConfig, RunConfig, is_on_hub, path_text
from slipstream.configs.schema.base import HUB
from slipstream.configs.schema.data import PROMPT_SUFFIXES, SourceConfig
from slipstream.configs.schema.live import live_places
from slipstream.configs.violations import ABSENT, Violation, one_of

PROMPTS = tuple(
    f"{section}.{name}"
    for section, several in (("data", "sources"), ("eval", "sets"))
    for name in ("path", several, "columns", "prompt_template")
)
PLUGINS = (
    "rollout.workflow",
    "rollout.reward",
    "rollout.group_filter",
    "rollout.data_source",
    "actor.objective",
    "actor.advantage",
    "actor.kl.penalty",
    "actor.transforms",
    "actor.metrics",
    "judge.code",
    "judge.score.prompt",
    "judge.score.parser",
    "judge.hint.question.prompt",
    "judge.hint.question.parser",
    "prepare",
)
COMPLETION_LENGTHS = ("rollout.sampling.max_new_tokens", "eval.sampling.max_new_tokens")

ELSEWHERE = (
    "; name a data set of the hub (hf://datasets/OWNER/NAME/FOLDER), or download it: hf download OWNER/NAME "
    "--repo-type dataset --local-dir FOLDER"
)

AS_LINES = {
    ".json": "; jq -c '.[]' OLD.json > NEW.jsonl writes each object of an array in a line",
    ".csv": "; pyarrow.parquet.write_table(pyarrow.csv.read_csv('OLD.csv'), 'NEW.parquet') makes one",
}
"""What makes a prompt file of one in another format, by its ending."""

NO_INPUTS = "slipstream.backend.simulate.only_simulated"
"""A ``prepare`` that excuses missing models and prompts: the run is planned or simulated, not trained."""

_HUB_NAME = re.compile(r"(?:https?:/huggingface\.co/|hf:)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)")
"""A model's name on the hub, as people write it. ``Path`` has taken one of two slashes away."""

SELF_REWARDING = ("slipstream.rollout.workflow.Verifiers",)
"""Workflows whose episodes have a reward of their own."""

LONGEST_NAME = 255
"""Bytes in one path component, on every file system in use."""


def run_folder_can_be_made(config: RunConfig) -> Iterator[Violation]:
    if len(config.run.name) > LONGEST_NAME:
        reason = f"expected at most {LONGEST_NAME} characters, because it names a folder"
        yield Violation("run.name", config.run.name, reason)
    elif closed := _closed(config.run.folder):
        yield Violation("run.root", str(config.run.root), closed)
    elif os.path.exists(config.run.root) and not os.path.isdir(config.run.root):
        reason = "expected a directory, or a path where one can be created"
        yield Violation("run.root", str(config.run.root), reason)
    elif os.path.exists(config.run.folder) and not os.path.isdir(config.run.folder):
        reason = f"{config.run.folder} exists and is not a directory; choose another name"
        yield Violation("run.name", config.run.name, reason)


def prompts_are_given(config: RunConfig) -> Iterator[Violation]:
    """Only live users can take the place of prompts."""
    live, has_users = config.live, config.gateway is not None
    if not config.has_prompts and not (has_users and (live is None or not live.train or live.share == 1)):
        yield Violation(
            "data",
            ABSENT,
            "expected the prompts to train on: only a run with a gateway can do without, if it trains on "
            "nothing (no section live, or live.train: false) or on live users alone (live.share: 1)",
        )


def length_is_given_once(config: RunConfig) -> Iterator[Violation]:
    steps, epochs = config.run.steps, config.run.epochs
    if steps is None and epochs is None:
        reason = "expected the length of the run: a number of training steps, or of passes in run.epochs"
        yield Violation("run.steps", ABSENT, reason)
    elif steps is not None and epochs is not None:
        reason = f"run.steps gives the length of the run too ({steps}); leave one of them out (null)"
        yield Violation("run.epochs", epochs, reason)


def epochs_are_of_known_data(config: RunConfig) -> Iterator[Violation]:
    """The number of steps of an epoch follows from the number of prompts."""
    epochs, rollout = config.run.epochs, config.rollout
    if epochs is None or config.run.steps is not None:
        return
    hooks = rollout.hooks
    if rollout.data_source is not None:
        why = "the order of rollout.data_source is endless"
    elif hooks is not None and hooks.data_source is not None:
        why = "a rollout.hooks.data_source gives as many prompts as it is asked for"
    elif config.data is None:
        why = "there are no prompts to train on (data)"
    elif live_places(config.live, rollout.batch_size) >= rollout.batch_size:
        why = "all places of a batch are those of live users (live.share: 1)"
    else:
        return
    yield Violation("run.epochs", epochs, f"{why}, and has no length to pass over; set run.steps instead")


def prompts_come_from_one_place(config: RunConfig) -> Iterator[Violation]:
    rollout = config.rollout
    if rollout.data_source is None:
        return
    if config.data is not None:
        yield Violation(
            "rollout.data_source",
            rollout.data_source.path,
            "the prompts would come from two places; leave `data` out, or set this to null",
        )
    if rollout.hooks is not None and rollout.hooks.data_source is not None:
        reason = "expected null: rollout.data_source gives the prompts"
        yield Violation("rollout.hooks.data_source", rollout.hooks.data_source, reason)


def reward_is_given(config: RunConfig) -> Iterator[Violation]:
    """A reward, or a hook or workflow that rewards, is given if there are prompts or an evaluation."""
    hooks = config.rollout.hooks
    if config.rollout.workflow.path in SELF_REWARDING:
        return
    if hooks is not None and (hooks.custom_rm or hooks.rm_type or hooks.custom_generate_function):
        return  # they reward
    if config.rollout.reward is None and (config.has_prompts or config.eval is not None):
        yield Violation(
            "rollout.reward",
            ABSENT,
            "missing, but required: Import path of a class with the method `score` of "
            "`slipstream.rollout.reward.Reward` or `score_group` of `GroupReward`, or of a function with the "
            "parameters of one of them",
        )


def prompts_are_named_once(config: RunConfig) -> Iterator[Violation]:
    """Prompts come from one path, or from several under different names."""
    data, evaluation = config.data, config.eval
    if data is not None:
        yield from _named_once("data", "sources", data.path, [each.name for each in data.sources])
        given = [each.weight is not None for each in data.sources]
        if any(given) and not all(given):
            without = ", ".join(each.name for each in data.sources if each.weight is None)
            yield Violation(
                f"data.sources.{given.index(False)}.weight",
                ABSENT,
                f"expected a weight for each source or for none; these have none: {without}",
            )
    if evaluation is not None:
        yield from _named_once("eval", "sets", evaluation.path, [each.name for each in evaluation.sets])


def _named_once(section: str, several: str, path: Path | None, names: list[str]) -> Iterator[Violation]:
    if path is None and not names:
        yield Violation(
            f"{section}.path", ABSENT, f"missing, but required: a prompt file, or {section}.{several}"
        )
    if path is not None and names:
        yield Violation(
            f"{section}.path",
            path_text(path),
            f"expected either one file, or several in {section}.{several}, and not both",
        )
    for place, name in enumerate(names):
        if name in names[:place]:
            reason = "another one has this name; expected names that differ, because metrics have them"
            yield Violation(f"{section}.{several}.{place}.name", name, reason)


def template_takes_the_place_of_a_column(config: RunConfig) -> Iterator[Violation]:
    sections: list[tuple[str, DataConfig | EvalConfig | SourceConfig]] = []
    for name, section in (("data", config.data), ("eval", config.eval)):
        sections += [(name, section)] if section is not None else []
    data, evaluation = config.data, config.eval
    sections += [(f"data.sources.{n}", each) for n, each in enumerate(data.sources if data else [])]
    sections += [(f"eval.sets.{n}", each) for n, each in enumerate(evaluation.sets if evaluation else [])]
    for name, section in sections:
        columns = section.columns
        if section.prompt_template and columns and "prompt" in columns.model_fields_set:
            reason = (
                f"expected no other prompt, because {name}.prompt_template makes it; leave one of them out"
            )
            yield Violation(f"{name}.columns.prompt", columns.prompt, reason)


def prompts_have_a_known_format(config: RunConfig) -> Iterator[Violation]:
    for file in (*config.training_files, *config.held_out_files):
        text = path_text(file.path)
        if is_on_hub(file.path):
            if file.path.parts[1:2] != ("datasets",) or len(file.path.parts) < 4:
                yield Violation(
                    file.setting, text, "expected hf://datasets/OWNER/NAME, with a folder or file"
                )
        elif file.path.suffix not in PROMPT_SUFFIXES:
            yield Violation(
                file.setting,
                text,
                f"expected a file that ends in {one_of(PROMPT_SUFFIXES)}, or a data set of the hub: "
                f"hf://datasets/OWNER/NAME{AS_LINES.get(file.path.suffix, '')}",
            )


def _is_prepared(config: RunConfig, path: Path) -> bool:
    """True if the recipe's ``prepare`` may make a path: one in a hidden folder is no slip of the pen."""
    if config.prepare is None or config.prepare.path == NO_INPUTS:
        return config.prepare is not None
    return any(part.startswith(".") and part.strip(".") for part in path.parts)


def _unprepared(config: RunConfig) -> str:
    """Return why nothing makes a path that does not exist."""
    if config.prepare is None:
        return ", and no `prepare` creates it"
    return f", and `prepare` creates only what lies in a hidden folder, such as {config.run.root}/.inputs"


def _closed(path: Path) -> str | None:
    """Return why a path cannot be looked at, if that is so."""
    try:
        os.stat(path)
    except PermissionError as error:
        return f"it cannot be read: {error.strerror}; expected a path that you may read, folders included"
    except OSError:
        pass
    return None


def prompts_exist(config: RunConfig) -> Iterator[Violation]:
    for file in (*config.training_files, *config.held_out_files):
        path = file.path
        if is_on_hub(path) or path.suffix not in PROMPT_SUFFIXES or _is_prepared(config, path):
            continue
        if "*" in path.name:
            is_there, absent = any(path.parent.glob(path.name)), "no file has such a name"
        else:
            is_there, absent = os.path.isfile(path), "there is no such file"
            if os.path.isdir(path):
                absent = "this is a folder, expected a file, or a name with a *"
            elif os.path.exists(path):
                absent = "this is a pipe or a device, expected a file"
        if not is_there and (closed := _closed(path)):
            yield Violation(file.setting, str(path), closed)
        elif not is_there:
            yield Violation(file.setting, str(path), f"{absent}{_unprepared(config)}{ELSEWHERE}")


def model_exists(config: RunConfig, path: str) -> Iterator[Violation]:
    folder = model_folder(config, path)
    if folder is None or is_on_hub(folder):
        return
    made = folder == config.model.path and _is_prepared(config, folder)
    if not made and not os.path.isfile(folder / "config.json"):
        if closed := _closed(folder / "config.json"):
            yield Violation(path, str(folder), closed)
            return
        also = _unprepared(config) if path == POLICY else ""
        reason = (
            f"it has no config.json{also}; expected a Hugging Face checkpoint directory on this machine"
            f"{_origin(folder)}"
        )
        yield Violation(path, str(folder), reason)


def _origin(folder: Path) -> str:
    """Return what makes a model's folder."""
    if folder.name == "checkpoint-hf":
        return f": the run {folder.parent.name} writes it when it ends"
    named = _HUB_NAME.fullmatch(str(folder))
    if named and not os.path.isdir(folder.parent) and repositories().get(folder.name, named[1]) == named[1]:
        return f", or {HUB}{named[1]}, which the run downloads from the hub"
    return f": {download_command(folder)}"


def model_config_is_readable(config: RunConfig, path: str) -> Iterator[Violation]:
    folder = model_folder(config, path)
    if folder is not None and os.path.isfile(folder / "config.json") and model_config(config, path) is None:
        yield Violation(path, str(folder), "its config.json is not a readable JSON object")


def plugin_can_be_found(config: RunConfig, path: str) -> Iterator[Violation]:
    """Only the top-level package is looked for: importing the rest could load torch."""
    name = setting(config, f"{path}.path", str)
    package = name.partition(".")[0] if name else None
    if package and not _is_importable(package):
        reason = f"there is no Python package {package!r}; install it or add its folder to PYTHONPATH"
        yield Violation(path, name, reason)


def vocabulary_is_the_policys(config: RunConfig, path: str) -> Iterator[Violation]:
    expected, size = (model_number(config, "vocab_size", model) for model in (POLICY, path))
    if expected and size and size != expected:
        reason = f"its vocabulary has {size} tokens; expected {expected}, the vocabulary of model.path"
        yield Violation(path, str(model_folder(config, path)), reason)


def completion_fits_the_model(config: RunConfig, path: str) -> Iterator[Violation]:
    """The length of the prompts is unknown here, but each has at least one token."""
    length = setting(config, path, int)
    context = model_number(config, "max_position_embeddings")
    if length is not None and context is not None and length >= context:
        reason = (
            f"expected less than {context}, the model's max_position_embeddings, to leave room for a prompt"
        )
        yield Violation(path, length, reason)


def _is_importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # ValueError: a module without a spec, such as __main__
        return False


RULES = (
    Rule(run_folder_can_be_made, ("run.name", "run.root")),
    Rule(prompts_are_given, ("data", "rollout.data_source", "gateway", "live.train", "live.share")),
    Rule(length_is_given_once, ("run.steps", "run.epochs")),
    Rule(
        epochs_are_of_known_data,
        (
            "run.steps",
            "run.epochs",
            "data",
            "rollout.data_source",
            "rollout.hooks.data_source",
            "rollout.batch_size",
            "live.train",
            "live.share",
        ),
    ),
    Rule(prompts_come_from_one_place, ("data", "rollout.data_source", "rollout.hooks.data_source")),
    Rule(
        reward_is_given,
        ("rollout.reward", "rollout.workflow", "rollout.hooks", "rollout.data_source", "data", "eval"),
    ),
    Rule(prompts_are_named_once, PROMPTS),
    Rule(template_takes_the_place_of_a_column, PROMPTS),
    Rule(prompts_have_a_known_format, PROMPTS),
    Rule(prompts_exist, ("prepare", *PROMPTS)),
    *(Rule(partial(model_exists, path=path), ("prepare", POLICY, path)) for path in (*MODELS, JUDGE)),
    *(Rule(partial(model_config_is_readable, path=path), (path,)) for path in (*MODELS, JUDGE)),
    *(Rule(partial(plugin_can_be_found, path=path), (path,)) for path in PLUGINS),
    *(Rule(partial(vocabulary_is_the_policys, path=path), (POLICY, path)) for path in OTHER_MODELS),
    *(Rule(partial(completion_fits_the_model, path=path), (POLICY, path)) for path in COMPLETION_LENGTHS),
)
