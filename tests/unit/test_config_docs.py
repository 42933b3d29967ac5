"""docs/recipes.md lists every setting of the schema, with its default, and no other."""

import re
from pathlib import Path

import yaml

from slipstream.configs.schema import PluginConfig, RunConfig
from slipstream.configs.schema.paths import schema_fields, schema_paths, sections_of
from slipstream.configs.violations import shown

PAGE = (Path(__file__).parents[2] / "docs/recipes.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip().strip("`"): cells[2].strip()
    for line in PAGE.splitlines()
    if re.match(r"\| `[^`]+` \| .* \| .* \| ", line) and len(cells := line.strip("|").split(" | ")) == 4
}


def documented_default(field) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    value = value.path if isinstance(value, PluginConfig) else value
    return f"`{shown(value) if not isinstance(value, str | Path) else value}`"


def settings() -> dict[str, str]:
    """The default of every path with a row of its own.

    Sections have none, as their settings have, nor has the inside of a plugin. A setting of several sections
    of a union is taken from the first of them, which is the default one.
    """
    found: dict[str, str] = {}
    for path, section, field in schema_fields():
        inner = set(sections_of(field).values())
        if section is not PluginConfig and inner <= {PluginConfig}:
            found.setdefault(".".join(path), documented_default(field))
    return found


def test_every_setting_has_a_row_with_its_default():
    expected = settings()
    assert {path: ROWS.get(path) for path in expected} == expected


def test_every_section_has_a_heading():
    sections = {".".join(path[:-1]) for path, section, _ in schema_fields() if section is not PluginConfig}
    headings = set(re.findall(r"^### (\S+)$", PAGE, re.M))
    assert sections - {""} <= headings


def test_the_page_names_no_setting_that_does_not_exist():
    plugin_keys = set(PluginConfig.model_fields)
    assert set(ROWS) - plugin_keys <= set(schema_paths())
    assert plugin_keys <= set(ROWS)


def test_the_first_example_is_a_valid_recipe():
    RunConfig.model_validate(yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.S)[1]))
