"""The examples: their recipes are valid, docs/customization.md shows them all, the notebook is Python."""

import ast
import json
import re

import pytest
import yaml

import slipstream
from slipstream.backend.driver.start.plugin_checks import plugin_problems
from slipstream.bridge.families import FAMILIES, model_spec
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.shards.plan import entries
from slipstream.configs.schema import RunConfig
from slipstream.rollout.system.plugins import resolved
from tests.environment import ROOT
from tests.models import make_checkpoint
from tests.pages import blocks
from tests.unit.test_bridge_families import tensors_in

EXAMPLES = ROOT / "examples"
RECIPES = sorted(EXAMPLES.rglob("*.yaml"))
GUIDE = ROOT / "docs/customization.md"
SHOWN = {block.source for block in blocks(GUIDE) if block.source}
"""Files of which the guide shows excerpts."""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_the_recipe_of_an_example_is_valid_and_its_code_has_the_right_shape(path):
    content = yaml.safe_load(path.read_text())
    is_complete = "prepare" in content  # the others name models that this machine lacks
    config = slipstream.load_recipe(path) if is_complete else RunConfig.model_validate(content)
    assert not plugin_problems(config)


def test_the_guide_shows_every_example():
    folders = {path.parent.name for path in EXAMPLES.glob("*/*.py")}
    shown = {path.split("/")[1] for path in SHOWN}
    assert folders - {"smollm2"} == shown, "docs/smollm2.md shows that one, and the guide its kind"
    assert all((EXAMPLES / folder / "README.md").exists() for folder in folders)


def test_the_guide_names_every_protocol():
    public = re.findall(r"^\| \[[^|]*\| [^|]*\| `(\w+)` \|", GUIDE.read_text(), re.M)
    assert {"Reward", "TokenObjective", "BatchMetrics", "Family", "OwnRun"} <= set(public)
    assert set(public) <= set(slipstream.__all__)


def test_the_notebook_holds_python_and_no_outputs():
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in code)
    for cell in code:
        ast.parse("".join(cell["source"]))


def test_a_family_by_import_path_maps_the_tensors_that_transformers_writes(tmp_path):
    folder = make_checkpoint(tmp_path, "dots1", tied=False)
    with pytest.raises(UnsupportedModel, match=r"'dots1' is not mapped; .* model\.families"):
        model_spec(folder)
    spec = model_spec(folder, resolved({"dots1": "examples.family.dots1"}))
    mapped = {
        name: shape
        for entry in entries(spec, Layout())
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)
    }
    assert mapped == tensors_in(folder)
    assert "dots1" not in FAMILIES


def test_a_recipe_may_be_a_dict_or_built_from_its_sections():
    content = yaml.safe_load((EXAMPLES / "objective/recipe.yaml").read_text())
    config = slipstream.load_recipe(content, ["run.steps=3"])
    assert config == slipstream.load_recipe(EXAMPLES / "objective/recipe.yaml", ["run.steps=3"])
    assert content["run"]["steps"] == 20, "an override leaves the dict as it is"
    assert slipstream.load_recipe(config.model_dump(exclude_unset=True)) == config
