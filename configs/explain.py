"""Say in words what pydantic refuses in a recipe: where it is, what was expected, and which key was meant."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, cast, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from slipstream.configs.installed import passthrough_path
from slipstream.configs.schema.base import Section
from slipstream.configs.schema.paths import schema_paths, sections_of
from slipstream.configs.schema.plugin import PluginConfig
from slipstream.configs.violations import join, nearest, one_of, shown

SAME_SECTION = 0.8
"""Similarity from which a name of the same section is suggested before an equal name of another section."""

MOST_SUGGESTIONS = 4

OTHER_NAMES: Mapping[str, str] = {
    name: setting
    for setting, names in {
        "run.name": "experiment_name exp_name run_name",
        "run.root": "output_dir out_dir save_dir default_local_dir log_dir",
        "run.steps": "max_steps total_steps num_steps total_training_steps total_train_steps num_rollout",
        "run.epochs": "num_epochs total_epochs num_train_epochs total_train_epochs num_epoch",
        "model.path": "model_path model_name model_name_or_path pretrained hf_checkpoint",
        "data.path": "train_files train_file train_data train_dataset dataset dataset_name prompt_data",
        "data.max_prompt_tokens": "max_prompt_length max_prompt_len rollout_max_prompt_len",
        "eval.path": "val_files val_file eval_dataset test_files eval_prompt_data",
        "eval.every": "test_freq eval_steps eval_interval eval_every",
        "actor.optimizer.lr": "learning_rate",
        "actor.optimizer.clip_grad": "max_grad_norm grad_clip gradient_clipping",
        "actor.optimizer.warmup_steps": "lr_warmup_steps lr_warmup_iters num_warmup_steps",
        "actor.minibatches": "ppo_mini_batch_size mini_batch_size num_minibatches num_steps_per_rollout",
        "actor.microbatch_tokens": "max_tokens_per_gpu ppo_max_token_len_per_gpu micro_batch_size",
        "actor.parallel.tensor": "tensor_model_parallel_size tensor_parallel_size tp tp_size",
        "actor.parallel.pipeline": "pipeline_model_parallel_size pp pp_size",
        "actor.kl.coefficient": "kl_coef kl_loss_coef kl_beta beta kl_ctl",
        "actor.advantage": "algorithm algo adv_estimator advantage_estimator",
        "actor.objective": "loss_type policy_loss loss_mode loss_fn",
        "actor.objective.clip_low": "clip_ratio eps_clip epsilon cliprange clip_range",
        "critic.discount": "gamma",
        "critic.gae_lambda": "lam lambd gae_lam",
        "rollout.batch_size": "train_batch_size rollout_batch_size per_device_train_batch_size",
        "rollout.n_samples_per_prompt": "n group_size num_generations n_samples rollout_n",
        "rollout.max_head_offpolicyness": "max_staleness staleness eta max_off_policy_steps",
        "rollout.sampling.max_new_tokens": "max_tokens max_completion_length max_response_length "
        "rollout_max_response_len max_length",
        "rollout.reward": "reward_fn reward_func reward_funcs reward_function rm_type compute_score",
        "rollout.engine.count": "num_engines n_engines",
        "rollout.engine.args": "gpu_memory_utilization",
        "checkpoint.every": "save_freq save_steps save_interval save_every",
    }.items()
    for name in names.split()
}
"""Names that other systems have for a setting, and our name."""

_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "path_type": "a path",
    "list_type": "a list of {items}",
    "dict_type": "a mapping",
    "too_short": "a list of at least {min_length} of {items}",
    "literal_error": "{expected}",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "string_pattern_mismatch": "{words}",
}
"""Description of the values that a setting accepts, by the type of pydantic's error."""

_QUOTED = {
    "bool_type": re.compile("(?i)true|false"),
    "int_type": re.compile(r"[-+]?\d+"),
    "float_type": re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?"),
}
"""Texts that would be values without quotes, by the type of pydantic's error."""

_BOOLEANS = {
    **dict.fromkeys(("yes", "y", "on", "1"), "true"),
    **dict.fromkeys(("no", "n", "off", "0"), "false"),
}
_NONE = ("none", "null", "nil")
_NUMBER = re.compile(r"(?i)([-+]?(?:[1-9]\d{0,2}(?:,\d{3})+|\d*[.,]?\d+)(?:e[-+]?\d+)?) *(?:([kmb%])|f)?")
_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "%": 0.01}
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]")
"""Texts as people write them elsewhere."""

_PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "letters, digits, '.', '_' and '-', the first a letter or a digit",
    r"^0?7[0-7][0145]$": "permissions in octal and in quotes, such as '0750': all for you, and no right to "
    "write for everybody",
    r"^https?://[^/\s]+(/[^\s?#]*)?$": "an address such as http://sandboxes.internal:8700",
    r"^https?://[^/\s@?#]+(/[^\s?#]*)?$": "an address such as http://127.0.0.1:4318, without a password",
    r"^[A-Za-z0-9_-]+(:.*)?$": "NAME or NAME: VALUE of a header",
    r"^[A-Za-z_]\w*$": "the name of an environment variable",
}
"""What texts match the patterns of the schema."""


def locate(
    root: type[Section], loc: Sequence[int | str]
) -> tuple[tuple[str, ...], type[Section], FieldInfo | None]:
    """The path of the setting at ``loc``, the section that it is in, and its field; None for an unknown key.

    Pydantic puts the type of a section into ``loc``, after the key of the section. The path leaves these
    types out, and keeps the indices of sections in a list.
    """
    path: list[str] = []
    section, field = root, None
    choices: Mapping[str, type[Section]] = {"": root}
    for place in loc:
        key = str(place)
        if isinstance(place, int) and choices:
            path.append(key)  # an item of a list of sections
            continue
        if len(choices) > 1:
            choices = {"": choices[key]}
            continue
        if not choices:
            break  # inside of a list
        section = choices[""]
        path.append(key)
        field = section.model_fields.get(key)
        choices = sections_of(field) if field else {}
    return tuple(path), section, field


ALGORITHMS: Mapping[str, str] = {
    "grpo": "'ppo' here, with `actor.advantage: [{type: reward, estimator: grpo}]`",
    "dr_grpo": "'ppo' here, with `actor.advantage: [{type: reward, estimator: dr_grpo}]`",
    "rloo": "'ppo' here, with `actor.advantage: [{type: reward, estimator: rloo}]`",
    "dapo": "'ppo' here, with `clip_high: 0.28` and the rollout.group_filter of the recipe "
    "dapo-qwen2.5-32b-8n8g-tp8dp3-async2",
    "reinforce_pp": "'ppo' here, with `actor.advantage: [{type: reward, estimator: reinforce_pp}]`",
    "reinforce++": "'ppo' here, with `actor.advantage: [{type: reward, estimator: reinforce_pp}]`",
}
"""Algorithms that are no objectives of their own, and what they are here."""


def nearest_type(name: str, sections: Mapping[str, type[Section]]) -> str | None:
    """Return the type of a section that ``name`` probably means; None: none is like it."""
    if "ppo" in sections and name.lower() in ALGORITHMS:
        return "ppo"
    return nearest(name, [type_ for type_ in sections if type_])


def expectation(problem: ErrorDetails, field: FieldInfo) -> str:
    """Return in words which values ``field`` accepts, as the reason for a refusal."""
    kind, sections = "list_type" if is_item(problem) else problem["type"], sections_of(field)
    if kind == "value_error":
        return str(problem.get("ctx", {})["error"])
    if kind == "missing":
        return f"missing, but required: {field.description or _mapping(sections)}"
    if kind == "union_tag_not_found":
        return f"missing; expected {one_of(map(shown, sections))}"
    if kind == "union_tag_invalid":
        tag = str(problem.get("ctx", {}).get("tag", ""))
        if "ppo" in sections and (recipe := ALGORITHMS.get(tag.lower())):
            return f"expected {one_of(map(shown, sections))}; {tag} is {recipe}"
        near = nearest_type(tag, sections)
        return f"expected {one_of(map(shown, sections))}" + (f"; did you mean {near!r}?" if near else "")
    if sections:
        is_list = get_origin(field.annotation) is list
        words = f"a list of at least one item, each {_mapping(sections)}" if is_list else _mapping(sections)
    elif kind in _EXPECTED:
        facts = problem.get("ctx", {})
        facts["words"] = _PATTERNS.get(pattern := facts.get("pattern", ""), f"text that matches {pattern}")
        words = _EXPECTED[kind].format(items=_items(field), **facts)
    else:
        words = problem["msg"].removeprefix("Input should be ")
    words += " or null" if type(None) in get_args(field.annotation) else ""
    is_quoted = kind in _QUOTED and _QUOTED[kind].fullmatch(str(problem["input"]))
    return f"expected {words}" + (", without quotes" if is_quoted else _meant(problem, kind, field))


def _meant(problem: ErrorDetails, kind: str, field: FieldInfo) -> str:
    """Return a question for the value that was meant, if what was given is one as elsewhere."""
    text = str(problem["input"]).lower() if isinstance(problem["input"], str | int | float) else ""
    meant: str | None = None
    if _VARIABLE.search(text):
        return "; variables are not read in a recipe"
    if text in _NONE and type(None) in get_args(field.annotation):
        meant = "null"
    elif kind == "bool_type":
        meant = _BOOLEANS.get(text)
    elif kind in ("int_type", "float_type"):
        meant = number_in(text, whole=kind == "int_type")
    return f"; did you mean {meant}?" if meant else ""


def number_in(text: str, *, whole: bool) -> str | None:
    """Return the number that a text such as ``10k`` or ``0,5`` is for people; None: it is none.

    >>> number_in("10k", whole=True), number_in("0,5", whole=False), number_in("2.5", whole=True)
    ('10000', '0.5', None)
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    digits, unit = match.groups()
    is_grouped = re.match(r"[-+]?[1-9]\d{0,2}(,\d{3})+(?!\d)", digits)
    value = float(digits.replace(",", "" if is_grouped else ".")) * _UNITS.get(unit or "", 1)
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return None if whole else repr(value)


def is_item(problem: ErrorDetails) -> bool:
    """True if ``problem`` is about an item of a list. The setting is the whole list."""
    return isinstance(problem["loc"][-1], int)


_ITEMS: dict[object, str] = {int: "whole numbers", str: "texts"}


def _items(field: FieldInfo) -> str:
    """Return in words which items the list in ``field`` holds."""
    for part in (field.annotation, *get_args(field.annotation)):
        if get_origin(part) is list:
            (item,) = get_args(part)
            if get_origin(item) is Literal:
                return ", ".join(map(shown, get_args(item)))
            return _ITEMS.get(getattr(item, "__origin__", item), "values")
    return "values"


def _mapping(sections: Mapping[str, type[Section]]) -> str:
    if "" not in sections:
        return f"a mapping whose `type` is {one_of(map(shown, sections))}"
    also = "an import path or " if sections[""] is PluginConfig else ""
    return f"{also}a mapping with {_keys(sections[''])}"


def _keys(section: type[Section]) -> str:
    fields = section.model_fields.items()
    required = [f"{name} (required)" for name, field in fields if field.is_required()]
    return ", ".join([*required, *(name for name, field in fields if not field.is_required())])


def _keys_within(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in cast("Mapping[str, object]", value).items():
            yield from list(_keys_within(inner)) or [name]


def unknown_key(
    root: type[Section], section: type[Section], path: Sequence[str], value: object
) -> tuple[str, list[str]]:
    """The reason to refuse the unknown key at ``path``, and the setting of ``section`` that it misspells.

    The key may be, in this order, almost spelled like a setting of the section, another system's name of a
    setting, a setting of another section, a field of Megatron or SGLang, or more roughly spelled like a
    setting of the section.
    """
    *outer, key = path
    if "." in key and (dotted := join(*path)) in schema_paths(root):
        *sections, setting = dotted.split(".")
        nested = f"{': {'.join(sections)}: {{{setting}: {shown(value)}}}{'}' * (len(sections) - 1)}"
        return f"unknown key; dots join keys on the command line only: write {nested}", [dotted]
    settings, name = list(section.model_fields), key.rpartition(".")[2]
    elsewhere = [other for other in schema_paths(root) if other.rpartition(".")[2] == name]
    elsewhere = [other for other in elsewhere if outer and other.startswith(f"{outer[0]}.")] or elsewhere
    if join(*(part for part in path if not part.isdigit())) in elsewhere:
        return f"unknown key; another type has it; the keys here are {_keys(section)}", []
    near = nearest(key, settings, SAME_SECTION)
    if near is None:
        theirs = [each.lower().replace("-", "_") for each in (name, *_keys_within(value))]
        if ours := [OTHER_NAMES[each] for each in theirs if OTHER_NAMES.get(each) in schema_paths(root)]:
            elsewhere = list(dict.fromkeys(ours))
        elif not 0 < len(elsewhere) <= MOST_SUGGESTIONS:
            elsewhere = [passed] if (passed := passthrough_path(name)) else []
        if elsewhere:
            return f"unknown key; did you mean {one_of(elsewhere)}?", []
        near = nearest(key, settings)
    if near is None:
        return f"unknown key; the keys here are {_keys(section)}", []
    meant = join(*outer, near)
    return f"unknown key; did you mean {meant}?", [meant]
