"""Import paths of a recipe: the object they name, or an error that says which part is wrong."""

import sys

import pytest

from slipstream.configs.schema.plugin import PluginConfig
from slipstream.rollout.reward import FinalAnswer
from slipstream.rollout.system import plugins
from slipstream.rollout.system.plugins import PluginError
from slipstream.rollout.workflow import SingleTurn


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes a module that a recipe can name; its import is undone at the end."""

    def write(source: str, name: str = "slipstream_user_module") -> str:
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    yield write
    sys.modules.pop("slipstream_user_module", None)


def test_the_built_in_plugins_resolve():
    assert plugins.resolve("slipstream.rollout.workflow.SingleTurn") is SingleTurn
    assert plugins.resolve("slipstream.rollout.reward.FinalAnswer") is FinalAnswer


def test_a_class_is_constructed_with_the_recipes_arguments(user_module):
    name = user_module("class Reward:\n    def __init__(self, scale=1):\n        self.scale = scale\n")
    assert plugins.build(PluginConfig(path=f"{name}.Reward", args={"scale": 3})).scale == 3
    assert plugins.build(PluginConfig(path=f"{name}.Reward")).scale == 1


def test_a_module_that_does_not_exist_is_named():
    with pytest.raises(PluginError, match=r"nowhere\.at_all\.Name: cannot import nowhere\.at_all: No module"):
        plugins.resolve("nowhere.at_all.Name")


def test_a_name_that_the_module_lacks_is_named():
    with pytest.raises(PluginError, match=r"rollout\.reward has no 'FinalAnser'"):
        plugins.resolve("slipstream.rollout.reward.FinalAnser")


def test_an_import_that_fails_inside_the_module_says_what_is_missing(user_module):
    name = user_module("import a_package_that_is_not_installed\n")
    with pytest.raises(PluginError, match="No module named 'a_package_that_is_not_installed'"):
        plugins.resolve(f"{name}.Reward")


def test_an_attribute_error_inside_the_module_is_not_taken_for_a_missing_name(user_module):
    name = user_module("import math\nmath.no_such_function()\nclass Reward: pass\n")
    with pytest.raises(PluginError, match=rf"AttributeError: .*no_such_function.* at .*{name}\.py:2"):
        plugins.resolve(f"{name}.Reward")


@pytest.mark.parametrize(
    ("source", "args"),
    [
        ("class Reward:\n    def __init__(self, scale): pass\n", {}),
        ("class Reward:\n    def __init__(self, scale): pass\n", {"scall": 1}),
        ("Reward = 5\n", {}),
    ],
)
def test_arguments_that_do_not_fit_are_named(user_module, source, args):
    name = user_module(source)
    with pytest.raises(PluginError, match=rf"{name}\.Reward cannot be constructed from args"):
        plugins.build(PluginConfig(path=f"{name}.Reward", args=args))


def test_a_constructor_that_refuses_its_arguments_is_heard():
    with pytest.raises(ValueError, match="marker must not be empty"):
        plugins.build(PluginConfig(path="slipstream.rollout.reward.FinalAnswer", args={"marker": ""}))
