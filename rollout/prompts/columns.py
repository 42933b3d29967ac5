"""From the columns of a row to the prompt that a recipe wants of it.

row ──► columns.prompt, or prompt_template filled in ──► prompt
    ──► columns.label ─────────────────────────────────► label
    ──► columns.metadata, or all other columns ────────► metadata

A name is that of a column. If there is no such column, its dots lead into objects:
``reward_model.ground_truth`` is ``ground_truth`` of the object in the column ``reward_model``.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from slipstream.configs.schema import ColumnsConfig, PromptFile
from slipstream.configs.schema.data import template_parts
from slipstream.rollout.prompts.chat import prompt_problem, with_joined_parts
from slipstream.rollout.prompts.rows import shown
from slipstream.rollout.tokens.trajectory import Messages, Prompt

ABSENT = object()
"""Stands for the value of a column that a row does not have."""

_USUAL = ColumnsConfig()


def value_at(columns: Mapping[str, object], name: str) -> Any:
    """Return the value of a column in a row, or ABSENT."""
    if name in columns:
        return columns[name]
    value: Any = columns
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return ABSENT
        value = cast("Mapping[str, object]", value).get(part, ABSENT)
    return value


class RowReader:
    """Makes prompts of the rows of one prompt file."""

    def __init__(self, file: PromptFile) -> None:
        self._name = file.name
        self._columns = file.columns
        self._template = None if file.template is None else list(template_parts(file.template))
        self._taken = {file.columns.label} | ({file.columns.prompt} if file.template is None else set[str]())
        """Columns that are no metadata."""
        self._expected = _expectation(file)

    def prompt(self, row: object, number: int, file: str, line: int) -> Prompt | str:
        """Return the prompt of a row, or what is wrong with it."""
        if not isinstance(row, dict):
            return f"it holds {shown(row)}, expected an object with {self._expected}"
        columns = cast("dict[str, object]", row)
        try:
            prompt = self._prompt(columns)
            label = self._label(columns)
            metadata = self._metadata(columns)
        except _WrongRow as error:
            return str(error)
        try:
            msgspec.msgpack.encode((prompt, label, metadata))  # as messages to other processes hold them
        except (TypeError, OverflowError, UnicodeEncodeError) as error:
            return f"{error}; write such a value as a text"
        return Prompt(number, prompt, label, metadata, file, line, self._name)

    def _prompt(self, columns: Mapping[str, object]) -> str | Messages:
        if self._template is not None:
            return "".join(
                text + ("" if name is None else self._text(columns, name)) for text, name in self._template
            )
        prompt = self._at(columns, self._columns.prompt)
        if isinstance(prompt, list):
            prompt = with_joined_parts(_without_nulls(cast("list[object]", prompt)))
        if (reason := prompt_problem(prompt)) is not None:
            raise _WrongRow(reason.replace("`prompt`", f"`{self._columns.prompt}`", 1))
        return cast("str | Messages", prompt)

    def _label(self, columns: Mapping[str, object]) -> object:
        name = self._columns.label
        if name is None or name == _USUAL.label:
            return columns.get(name) if name else None
        return self._at(columns, name)

    def _metadata(self, columns: dict[str, object]) -> dict[str, object]:
        name = self._columns.metadata
        if name is None:
            return {column: value for column, value in columns.items() if column not in self._taken}
        value = self._at(columns, name)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                """It is said below."""
        if value is not None and not isinstance(value, dict):
            raise _WrongRow(f"`{name}` is {shown(value)}, expected an object, or the JSON text of one")
        return cast("dict[str, object]", value or {})

    def _at(self, columns: Mapping[str, object], name: str) -> object:
        """Return the value of a column in a row. Raises _WrongRow."""
        value = value_at(columns, name)
        if value is ABSENT:
            names = ", ".join(map(repr, columns)) or "no columns"
            raise _WrongRow(
                f"expected an object with {self._expected}, found {names}: say which column it is "
                "(`columns`), or rename the column"
            )
        return value

    def _text(self, columns: Mapping[str, object], name: str) -> str:
        value = self._at(columns, name)
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        raise _WrongRow(f"`{name}` is {shown(value)}, expected a text or a number for `prompt_template`")


class _WrongRow(ValueError):
    """A row cannot be used. The message says why."""


def _expectation(file: PromptFile) -> str:
    columns = file.columns
    if file.template is not None:
        return " and ".join(f"`{name}`" for _, name in template_parts(file.template) if name is not None)
    if columns == _USUAL:
        return "`prompt` (and `label`)"
    return " and ".join(f"`{name}`" for name in (columns.prompt, columns.label, columns.metadata) if name)


def _without_nulls(messages: list[object]) -> list[object]:
    """Return chat messages without fields that are null: the rows of a parquet file have all the same."""
    return [
        {name: value for name, value in fields.items() if value is not None or name == "content"}
        if isinstance(message, dict) and None in (fields := cast("dict[str, object]", message)).values()
        else message
        for message in messages
    ]
