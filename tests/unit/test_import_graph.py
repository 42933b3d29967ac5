"""Which package may import which: ``backend -> rollout -> configs`` and ``backend -> bridge -> configs``."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"backend", "bridge", "configs", "rollout"}
HEAVY = {"torch", "ray", "sglang", "megatron", "transformers"}

FORBIDDEN = {
    "configs": (OURS - {"configs"}) | HEAVY,
    "bridge": (OURS - {"bridge", "configs"}) | {"ray", "sglang", "megatron", "transformers"},
    "rollout": {"backend", "bridge", "megatron"},
    "backend": set(),
}
"""What no module of a package may import, not even inside a function."""

CPU_SUPPORT = {
    "backend.megatron.cpu": "backend.megatron.parallel",
    "rollout.engine.cpu": "rollout.engine.process",
}
"""The CPU support of a library, and the one module that may import it."""


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        if "stand_ins" in path.parts:  # put before the real libraries on sys.path, and named like them
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(name: str, path: Path) -> set[str]:
    """Every module that is imported anywhere in a file; ``from a import b`` counts as a and as a.b."""
    found: set[str] = set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_a_package_imports_only_what_lies_below_it(package):
    names = list(modules(package))
    assert names
    wrong = {
        f"{name} imports {target}"
        for name, path in names
        for target in imported(name, path)
        if target.partition(".")[0] in FORBIDDEN[package]
    }
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.parametrize("package", sorted(OURS))
def test_no_package_imports_the_tests_or_benchmarks(package):
    for name, path in modules(package):
        assert not {t for t in imported(name, path) if t.partition(".")[0] in ("tests", "benchmarks")}, name


@pytest.mark.parametrize("support", sorted(CPU_SUPPORT))
def test_cpu_support_is_imported_by_one_module_only(support):
    importers = {
        name for package in OURS for name, path in modules(package) if support in imported(name, path)
    }
    assert importers == {CPU_SUPPORT[support]}


def test_sglang_is_imported_only_where_its_server_is_launched_or_described():
    importers = {
        name
        for package in OURS - {"configs"}
        for name, path in modules(package)
        if any(target.partition(".")[0] == "sglang" for target in imported(name, path))
    }
    assert importers <= {"rollout.engine.launch", "rollout.engine.cpu"}


def loaded_after(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after ``code``."""
    script = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return set(ended.stdout.split())


def test_the_driver_loads_neither_torch_nor_megatron_nor_sglang():
    assert not loaded_after("import backend.cli, backend.run") & (HEAVY - {"ray"})


def test_the_command_line_itself_loads_nothing_heavy():
    assert not loaded_after("import backend.cli") & HEAVY


def test_a_recipe_is_checked_without_anything_heavy():
    assert not loaded_after("import configs.load, configs.rules, configs.installed") & HEAVY


def test_a_plan_is_made_without_torch():
    assert not loaded_after("import bridge.plan, bridge.families, bridge.report") & HEAVY
