"""Load a recipe: a file and its overrides become a ``RunConfig``, or one report of everything that is wrong.

    text -> plain data -> typed sections -> rules between settings, fields of Megatron and SGLang
            document.py   here, schema      rules                   installed

One mistake must not hide another. Pydantic names every value that it refuses. Each of them is put into words
(``explain``) and replaced by its default, or by a placeholder if it has none, and the data is validated
again. The rules then check the result, except those that read a replaced value.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar, cast, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from slipstream.configs.document import Document, read_document, read_text
from slipstream.configs.explain import expectation, is_item, locate, nearest_type, unknown_key
from slipstream.configs.installed import check_passthrough
from slipstream.configs.rules import check_rules
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.actor import ParallelConfig
from slipstream.configs.schema.base import Section
from slipstream.configs.schema.cluster import SiteConfig
from slipstream.configs.schema.paths import sections_of
from slipstream.configs.schema.supervised import SupervisedConfig
from slipstream.configs.supervised import AS_IN_SUPERVISED, Supervised, preferences_are_not_shared, run_of
from slipstream.configs.violations import ABSENT, RecipeError, Violation, join, one_of

Root = TypeVar("Root", bound=Section)

SITE = "SLIPSTREAM_SITE"
"""Variable with the path of the site file."""

IN_PYTHON = Path("the recipe in Python")
"""Stands for the file of a recipe that has none, in messages."""


def load_recipe(
    recipe: Path | Mapping[str, object],
    overrides: Sequence[str] = (),
    site: Mapping[str, object] | None = None,
) -> RunConfig:
    """Read ``recipe`` (a file, the bare name of a recipe in configs/recipes, or what a file would hold), then
    apply ``overrides``.

    An override is ``dotted.path=value`` with the value in YAML; later ones win. ``site``: from ``load_site``,
    for what neither of them says of ``cluster``. Raises ``RecipeError`` with all mistakes, and nothing else.
    """
    document = read_document(recipe, overrides, site)
    source = recipe if isinstance(recipe, Path) else IN_PYTHON
    given = (document.data or {}).keys()
    own = sorted(given & SupervisedConfig.model_fields.keys() - RunConfig.model_fields.keys())
    if own and "rollout" not in given:
        reason = (
            f"missing, and {one_of(own)} is of a recipe of supervised training: train it with "
            "`slipstream sft RECIPE`, and give `--sft` to check, plan and submit"
        )
        raise RecipeError([*document.violations, Violation("rollout", ABSENT, reason)], str(source))
    config = _validated(RunConfig, document, source)
    violations = [*document.violations, *_check_together(config, document.unsure)]
    if violations:
        violations = [_with_place(violation, source.parent) for violation in violations]
        raise RecipeError(violations, str(source), config, document.unsure)
    return config


def _with_place(violation: Violation, folder: Path) -> Violation:
    """Return the violation, which says so if what is missing lies beside the recipe, in ``folder``."""
    value = violation.value
    if not isinstance(value, str) or not value or folder == Path() or Path(value).is_absolute():
        return violation
    module = f"{value.partition('.')[0]}.py"
    if os.path.lexists(value) or os.path.lexists(module):
        return violation
    if not os.path.lexists(folder / value) and not os.path.lexists(folder / module):
        return violation
    place = f"{folder} has it, and paths are relative to the folder where slipstream is called: cd {folder}"
    return replace(violation, reason=f"{violation.reason}; {place}")


def check_recipe(config: RunConfig) -> None:
    """Check a recipe that was built from its sections in Python. Raises ``RecipeError``."""
    _raise_any(list(_check_together(config, set())), IN_PYTHON)


def load_supervised(
    recipe: Path, overrides: Sequence[str] = (), site: Mapping[str, object] | None = None
) -> Supervised:
    """Load a recipe of ``slipstream sft`` as ``load_recipe`` does, and make a run of the trainer from it."""
    document = read_document(recipe, overrides, site)
    rollout = (document.data or {}).get("rollout")
    if isinstance(rollout, dict) and "max_head_offpolicyness" in rollout:
        reason = "found, as in recipes of `slipstream train`; those of `slipstream sft` have none: leave "
        reason += "out --sft, or train it with `slipstream train`"
        raise RecipeError([*document.violations, Violation("rollout", ABSENT, reason)], str(recipe))
    supervised = _validated(SupervisedConfig, document, recipe)
    config = run_of(supervised)
    unsure = document.unsure | {path for path, name in AS_IN_SUPERVISED.items() if name in document.unsure}
    violations = [violation.renamed(AS_IN_SUPERVISED) for violation in _check_together(config, unsure)]
    _raise_any([*document.violations, *violations, *preferences_are_not_shared(supervised)], recipe)
    return Supervised(config, supervised.learn, supervised.data.columns)


def site_file(variables: Mapping[str, str]) -> Path | None:
    """Return the file with the settings of this site; None if there is none.

    ``variables``: the environment. An empty ``SLIPSTREAM_SITE`` means no site, and without the variable the
    file of the user is read.
    """
    if (named := variables.get(SITE)) is not None:
        return Path(named).expanduser() if named else None
    home = variables.get("XDG_CONFIG_HOME") or str(Path(variables.get("HOME", "~")).expanduser() / ".config")
    own = Path(home) / "slipstream" / "site.yaml"
    return own if own.is_file() else None


def load_site(file: Path) -> dict[str, object]:
    """Return the settings of a site, by their names in ``cluster``. Raises ``RecipeError``."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = f"the site file cannot be read: {getattr(error, 'strerror', None) or error}"
        raise RecipeError([Violation(str(file), ABSENT, reason)], "the site file") from None
    document = read_text(text, str(file), "partition, account and so on (docs/cluster.md)")
    _validated(SiteConfig, document, file)
    _raise_any(document.violations, file)
    return document.data or {}


def load_layout(model: Path, parallel: Mapping[str, object]) -> ParallelConfig:
    """Check ``actor.parallel``, without the rest of a recipe, for the HF checkpoint at ``model``.

    Raises ``RecipeError`` with every violation. It does not say whether ``model`` is a checkpoint.
    """
    document = Document({"model": {"path": str(model)}, "actor": {"parallel": dict(parallel)}})
    config = _validated(RunConfig, document, model)
    violations = [*document.violations, *check_rules(config, document.unsure)]
    about_layout = [problem for problem in violations if problem.path.startswith("actor.parallel.")]
    _raise_any(about_layout, "the layout")
    return config.actor.parallel


def _check_together(config: RunConfig, unsure: set[str]) -> Iterator[Violation]:
    yield from check_rules(config, unsure)
    yield from check_passthrough(config)


def _raise_any(violations: Sequence[Violation], source: Path | str) -> None:
    if violations:
        raise RecipeError(violations, str(source))


MOST_ROUNDS = 20
"""Rounds of validation. More of them mean that a placeholder is refused as well, and would be for ever."""


def _validated(root: type[Root], document: Document, source: Path) -> Root:
    """Validate ``document.data``, and add to the document's violations and unsure paths.

    The loop ends because every refused value is replaced by a valid one. It has a second round for a section
    whose ``type`` is misspelt, since the settings of a section are unknown before its type is.
    """
    if document.data is None:
        raise RecipeError(document.violations, str(source))
    data = document.data
    for _ in range(MOST_ROUNDS):
        try:
            return root.model_validate(data)
        except ValidationError as error:
            for problem in error.errors(include_url=False):
                data = _repaired(data, problem, root, document)
    raise RecipeError(document.violations, str(source))


def _repaired(
    data: object, problem: ErrorDetails, root: type[Section], document: Document
) -> dict[str, object]:
    """Report ``problem``, and return a copy of ``data`` with a valid value in place of the refused one."""
    path, section, field = locate(root, problem["loc"])
    value = ABSENT if problem["type"] == "missing" else problem["input"]
    if field is None:
        reason, meant = unknown_key(root, section, path, value)
        document.violations.append(Violation(join(*path), value, reason))
        document.unsure.update(meant)
        return _replaced(data, path, ABSENT)
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
        name = problem["input"].get("type", ABSENT)
        document.refuse((*path, "type"), expectation(problem, field), name)
        document.unsure.add(join(*path))
        near = nearest_type(name, sections_of(field)) if isinstance(name, str) else None
        if near:
            return _replaced(data, (*path, "type"), near)
        return _replaced(data, path, _placeholder(field) if field.is_required() else ABSENT)
    if is_item(problem) and path[-1].isdigit():
        path = path[:-1]
    if is_item(problem) and (value := _value_at(data, path)) is ABSENT:
        return _replaced(data, path, ABSENT)  # another item of the list was refused before
    document.refuse(path, expectation(problem, field), value)
    return _replaced(data, path, _placeholder(field) if field.is_required() else ABSENT)


def _value_at(data: object, path: Sequence[str]) -> object:
    for key in path:
        data = cast(Mapping[str, object], data).get(key, ABSENT) if isinstance(data, dict) else ABSENT
    return data


def _replaced(data: object, path: Sequence[str], value: object) -> dict[str, object]:
    """A copy of ``data`` with ``value`` at ``path``, or with nothing there if ``value`` is ABSENT.

    A list of which one item is refused as a whole is left out, and stays so.
    """
    copy = dict(cast(Mapping[str, object], data)) if isinstance(data, dict) else {}
    key, *inner = path
    if inner and inner[0].isdigit():
        items = _with_item(copy.pop(key, ABSENT), int(inner[0]), inner[1:], value)
        return copy if items is ABSENT else {**copy, key: items}
    if inner:
        copy[key] = _replaced(copy.get(key), inner, value)
    elif value is ABSENT:
        copy.pop(key, None)
    else:
        copy[key] = value
    return copy


def _with_item(items: object, place: int, path: Sequence[str], value: object) -> object:
    """A copy of a list of sections with ``value`` at ``path`` of one of them; ABSENT: there is no list."""
    if not isinstance(items, list) or not path:
        return ABSENT
    copy = list(cast("list[object]", items))
    copy[place] = _replaced(copy[place], path, value)
    return copy


def _placeholder(field: FieldInfo) -> object:
    """A valid value for a required setting. No rule reads it."""
    for type_, section in sections_of(field).items():
        required = {name: inner for name, inner in section.model_fields.items() if inner.is_required()}
        named: dict[str, object] = {"type": type_} if type_ else {}
        return named | {name: _placeholder(inner) for name, inner in required.items()}
    if get_origin(field.annotation) is Literal:
        return get_args(field.annotation)[0]
    return 1 if field.annotation is int or field.annotation is float else "missing.value"
