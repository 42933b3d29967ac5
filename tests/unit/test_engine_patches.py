"""What Slipstream changes inside SGLang is listed, and the list is that of the pinned release."""

import ast
import re

import pytest

from slipstream.configs.installed.environment import pinned
from slipstream.rollout.engine import adapters, cpu, patches
from slipstream.rollout.engine.patches import PATCHES, VERSION, ChangedSource, changes, check, digest_of
from tests.environment import ROOT

ADVICE = (
    "read what has changed in SGLang, and whether it now offers what the patch does; then write "
    "VERSION and the digests anew: python -m slipstream.rollout.engine.patches"
)


def test_the_pinned_release_is_the_one_that_the_patches_were_written_for():
    assert pinned("gpu")["sglang"] == VERSION, ADVICE
    assert pinned("cpu")["sglang"] == VERSION, ADVICE
    [extra] = re.findall(r'"sglang==([^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert extra == VERSION, ADVICE


def test_the_source_that_is_replaced_is_the_one_that_the_patches_were_written_for():
    assert changes() == [], ADVICE


def test_every_patch_names_a_function_of_ours_and_its_reason():
    for patch in PATCHES:
        module, _, name = patch.by.rpartition(".")
        file = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
        made = {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert name in made, patch.by
        assert patch.why and patch.digest


def assignments(tree: ast.Module) -> set[tuple[str, str]]:
    """Functions of a module, and the attributes of things of SGLang that each of them sets."""
    found = set()
    outside = imported(tree.body)
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        names = outside | imported(function.body)
        for node in ast.walk(function):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if isinstance(target, ast.Attribute) and ast.unparse(target.value).split(".")[0] in names:
                    found.add((function.name, target.attr))
    return found


def imported(body: list[ast.stmt]) -> set[str]:
    """Names that are imported from SGLang."""
    return {
        alias.asname or alias.name
        for node in body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang")
        for alias in node.names
    }


OF_THE_APP = {"build_middleware_stack"}
"""Starlette's, of SGLang's app: the list has the function of SGLang that starts the app."""
NEW = {"get_cpu_graph_seq_len_fill_value"}
"""What a class of SGLang lacks: the list has the class."""


def test_whatever_is_set_inside_sglang_is_listed():
    for package in ("backend", "bridge", "rollout"):
        for file in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(("slipstream", *file.relative_to(ROOT).with_suffix("").parts))
            for function, attribute in assignments(ast.parse(file.read_text(encoding="utf-8"))):
                listed = [patch for patch in PATCHES if patch.by == f"{module}.{function}"]
                named = {re.split("[:.]", patch.target)[-1] for patch in listed}
                assert listed and attribute in named | OF_THE_APP | NEW, f"{module}.{function}: {attribute}"


def test_the_scan_sees_what_launch_and_the_cpu_support_set():
    seen = {
        name: assignments(ast.parse((ROOT / f"rollout/engine/{name}.py").read_text()))
        for name in ("launch", "cpu")
    }
    assert ("_announce_shared_memory", "init_new") in seen["launch"]
    assert ("_be_another_node", "wait_port_available") in seen["launch"]
    assert ("fork_processes", "_set_envs_and_config") in seen["cpu"]


# ---- at a start

MODULES = (patches.LAUNCH, *(path.rpartition(".")[0] for path in (cpu.PREPARE, adapters.PREPARE)))


def change(monkeypatch, name: str) -> None:
    """Let every source whose target ends with ``name`` be another one."""
    monkeypatch.setattr(
        patches, "digest_of", lambda target: "" if target.endswith(name) else digest_of(target)
    )


def test_another_release_whose_source_is_the_same_is_used(monkeypatch):
    monkeypatch.setattr(patches, "installed", lambda: "0.5.22")
    check(*MODULES)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target.rpartition(":")[2])
def test_another_release_that_has_changed_what_is_replaced_is_refused_where_it_is_replaced(
    patch, monkeypatch
):
    monkeypatch.setattr(patches, "installed", lambda: "0.5.22")
    change(monkeypatch, patch.target)
    own = patch.by.rpartition(".")[0]
    with pytest.raises(ChangedSource, match=r"SGLang 0\.5\.22 found, 0\.5\.21 expected") as refused:
        check(own)
    assert patch.target in str(refused.value) and "make install" in str(refused.value)
    check(*{patches.LAUNCH, *MODULES} - {own})


def test_the_release_itself_is_not_read(monkeypatch):
    monkeypatch.setattr(patches, "digest_of", lambda target: pytest.fail("the source was read"))
    check(*MODULES)


@pytest.mark.parametrize(
    "target",
    ["sglang.nowhere:f", "sglang.srt.server_args:PortArgs.gone", "sglang.srt.server_args:gone", "nothing:f"],
)
def test_what_is_gone_has_no_digest(target):
    assert digest_of(target) == ""
