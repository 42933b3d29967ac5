"""Every block of code of a page holds: recipes load, Python compiles and its imports resolve, data parse."""

import ast
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.backend.driver.start.plugin_checks import plugin_problems
from slipstream.configs.document import read_document
from slipstream.configs.load import load_recipe
from slipstream.configs.schema import RolloutConfig, RunConfig
from slipstream.configs.schema.cluster import SiteConfig
from slipstream.configs.violations import RecipeError, Violation
from tests.environment import ROOT
from tests.pages import LANGUAGES, NOT_INSTALLED, Block, all_blocks

RECIPE = {
    "run": {"name": "my-run", "steps": 10},
    "model": {"path": "policy"},
    "data": {"path": "train.jsonl"},
    "rollout": {
        "max_head_offpolicyness": 1,
        "batch_size": 4,
        "n_samples_per_prompt": 4,
        "reward": "slipstream.rollout.reward.Exact",
    },
}
"""What the parts of recipes on the pages are added to."""


def merged(recipe: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(recipe)
    for key, value in part.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


PYTHON = [block for block in all_blocks("python") if not block.source]
"""Examples that are shown for themselves, and are no excerpts of files that other tests run."""

READERS = re.compile(r"\bmy_\w+(?:\.\w+)+")
"""Import paths of code that is the reader's."""


def parts(block: Block, scratch: Path) -> list[dict[str, Any]]:
    """Return the part of a recipe that a block holds, read as a recipe is. Lines may be alternatives."""
    file = scratch / "part.yaml"
    file.write_text(block.code, encoding="utf-8")
    document = read_document(file, [])
    if any(each.reason.startswith("given twice") for each in document.violations):
        lines = [replace(block, code=line) for line in block.code.splitlines()]
        return [part for line in lines for part in parts(line, scratch)]
    assert not document.violations and document.data, document.violations
    return [document.data]


def completed(part: dict[str, Any]) -> dict[str, Any]:
    """Return a whole recipe with ``part`` in it."""
    if not part.keys() <= RunConfig.model_fields.keys():
        assert part.keys() <= RolloutConfig.model_fields.keys(), "neither of a recipe nor of its rollout"
        part = {"rollout": part}
    recipe = merged(deepcopy(RECIPE), {"gateway": {}, "live": {}} if "judge" in part else {})
    if "sources" in part.get("data", ()):
        del recipe["data"]["path"]
    if "ModelVotes" in str(part):
        recipe["judge"] = {"type": "model", "endpoint": {"type": "policy"}}
    if "rm_type" in part.get("rollout", {}).get("hooks", ()):
        del recipe["rollout"]["reward"]
    return merged(recipe, part)


@pytest.fixture(scope="module", autouse=True)
def code_of_the_reader(tmp_path_factory) -> Iterator[None]:
    """A folder with a model, prompts, and modules of what the pages define, as their recipes call it."""
    folder = tmp_path_factory.mktemp("reader")
    for path in sorted({path for block in all_blocks("yaml") for path in READERS.findall(block.code)}):
        module, _, name = path.rpartition(".")
        file = folder.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        defined = [block.code for block in PYTHON if name in defined_names(block.code)]
        assert defined, f"a recipe names {path}, which no page defines"
        with file.open("a", encoding="utf-8") as out:
            out.write(f"from slipstream import *\n\n{defined[0]}\n")
    (folder / "policy").mkdir()
    (folder / "policy/config.json").write_text("{}")
    (folder / "train.jsonl").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.chdir(folder)
        patch.setenv("JUDGE_KEY", "secret")
        yield


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=str)
def test_a_recipe_or_a_part_of_one_loads_and_the_code_that_it_names_fits(block: Block, tmp_path: Path):
    given = parts(block, tmp_path)
    if all(part.keys() <= SiteConfig.model_fields.keys() for part in given):
        assert [SiteConfig.model_validate(part) for part in given]
        return
    for recipe in map(completed, given):
        try:
            config = load_recipe(recipe)
        except RecipeError as error:
            overrides = [override for each in error.violations for override in provided(each)]
            config = load_recipe(recipe, overrides)
        assert not [each for each in plugin_problems(config) if not each.endswith(" is no program")]


def provided(violation: Violation) -> Iterator[str]:
    """Make a file or model that only the reader has. For an absolute path, yield an override instead."""
    is_model = violation.reason.startswith("it has no config.json")
    assert is_model or violation.reason.startswith("there is no such file"), str(violation)
    path = Path(str(violation.value))
    if path.is_absolute():
        yield f"{violation.path}={'policy' if is_model else 'train.jsonl'}"
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree("policy", path) if is_model else shutil.copy("train.jsonl", path)


def defined_names(code: str) -> set[str]:
    return set(re.findall(r"^(?:async def|def|class) (\w+)", code, re.MULTILINE))


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_what_python_imports_is_there(block: Block):
    wrong = []
    for node in ast.walk(ast.parse(block.code)):
        modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.module and not node.level
            module = importlib.import_module(node.module)
            wrong += [f"{node.module}.{name.name}" for name in node.names if not hasattr(module, name.name)]
        for name in modules:
            if name not in NOT_INSTALLED:
                importlib.import_module(name)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "slipstream":
            wrong += [] if hasattr(slipstream, node.attr) else [f"slipstream.{node.attr}"]
    assert not wrong


def test_every_name_in_python_is_defined(tmp_path):
    """A name may come from another block of the page, or from the package `slipstream`."""
    files = {}
    for number, block in enumerate(PYTHON):
        file = tmp_path / f"block_{number}.py"
        file.write_text(block.code, encoding="utf-8")
        files[file.name] = block
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "--output-format=json"]
    said = subprocess.run([*ruff, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False)
    wrong = []
    for each in json.loads(said.stdout):
        block, name = files[Path(each["filename"]).name], re.findall("`(.+)`", each["message"])[0]
        others = [other.code for other in PYTHON if other.page == block.page]
        page = set().union(*map(defined_names, others))
        if name not in page | set(slipstream.__all__):
            wrong.append(f"{block}, line {each['location']['row']} of the block: {name}")
    assert not wrong


@pytest.mark.parametrize("block", [block for block in all_blocks(*LANGUAGES) if block.source], ids=str)
def test_an_excerpt_is_one(block: Block):
    text = (ROOT / block.source).read_text(encoding="utf-8")
    assert block.code in text or block.code in re.sub(r'^ *"""(.|\n)*?"""\n', "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("block", all_blocks("json"), ids=str)
def test_json_is_a_line_for_each_object(block: Block):
    assert all(isinstance(json.loads(line), dict) for line in block.code.splitlines())


def test_the_message_of_a_wrong_recipe_is_the_one_of_the_page():
    [block] = [block for block in all_blocks("text") if " violations in my-run.yaml:" in block.code]
    settings = re.findall(r"^  (\S+) = (.+?): (.*)$", block.code, re.MULTILINE)
    with pytest.raises(RecipeError) as error:
        load_recipe(RECIPE, [f"{path}={value}" for path, value, _ in settings])
    said = {(each.path, each.reason) for each in error.value.violations}
    assert said == {(path, reason) for path, _, reason in settings}


def test_overrides_of_the_page_are_read_as_it_says():
    [block] = [block for block in all_blocks("text") if block.code.startswith("run.steps=2")]
    overrides = [shlex.split(line)[0] for line in block.code.splitlines()]
    config = load_recipe(RECIPE, ["actor.recompute=selective", *overrides])
    assert config.run.steps == 2 and config.actor.optimizer.lr == 1e-5 and config.eval is None
    assert config.rollout.engine.args == {"mem_fraction_static": 0.7}
    assert config.actor.megatron == {"recompute_modules": ["core_attn"]}


@pytest.mark.parametrize("block", all_blocks("bash"), ids=str)
def test_a_script_has_the_syntax_of_a_shell(block: Block):
    said = subprocess.run(
        ["bash", "-n"], input=block.code, capture_output=True, text=True, timeout=240, check=False
    )
    assert said.returncode == 0, said.stderr
