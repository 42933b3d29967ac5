"""docs/recipes.md lists every setting of the schema with its default and description, and no other."""

import re
from pathlib import Path

from slipstream.configs.schema import PluginConfig
from slipstream.configs.schema.paths import schema_fields, schema_paths, sections_of
from slipstream.configs.schema.supervised import SupervisedConfig
from slipstream.configs.violations import shown

PAGE = (Path(__file__).parents[2] / "docs/recipes.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip().strip("`"): (cells[2].strip(), cells[3].strip())
    for line in PAGE.splitlines()
    if re.match(r"\| `[^`]+` \| .* \| .* \| ", line) and len(cells := line.strip("|").split(" | ")) == 4
}
"""Default and meaning of every setting on the page."""


def documented_default(field) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    value = value.path if isinstance(value, PluginConfig) else value
    return f"`{shown(value) if not isinstance(value, str | Path) else value}`"


def settings() -> dict[str, list]:
    """The fields of every path with a row of its own. Several types of a section may have the same setting.

    Sections have no row, because their settings have, nor has the inside of a plugin.
    """
    fields: dict[str, list] = {}
    for path, section, field in schema_fields():
        if section is not PluginConfig and set(sections_of(field).values()) <= {PluginConfig}:
            fields.setdefault(".".join(path), []).append(field)
    return fields


def test_every_setting_has_a_row_with_its_default():
    expected = {path: documented_default(fields[0]) for path, fields in settings().items()}
    assert {path: ROWS.get(path, [None])[0] for path in expected} == expected


def test_the_meaning_of_a_setting_is_its_description():
    expected = [(path, field.description) for path, fields in settings().items() for field in fields]
    wrong = [
        (path, description)
        for path, description in expected
        if not path.endswith(".type") and (not description or description not in ROWS[path][1])
    ]
    assert not wrong


def test_every_setting_is_described():
    fields = [*schema_fields(), *schema_fields(SupervisedConfig)]
    undescribed = [
        ".".join(path) for path, _, field in fields if not field.description and not sections_of(field)
    ]
    assert all(path.endswith(".type") for path in undescribed), undescribed


def test_every_section_has_a_heading():
    sections = {".".join(path[:-1]) for path, section, _ in schema_fields() if section is not PluginConfig}
    headings = set(re.findall(r"^### (\S+)$", PAGE, re.M))
    assert sections - {""} <= headings


def test_the_page_names_no_setting_that_does_not_exist():
    plugin_keys = set(PluginConfig.model_fields)
    assert set(ROWS) - plugin_keys <= set(schema_paths())
    assert plugin_keys <= set(ROWS)
