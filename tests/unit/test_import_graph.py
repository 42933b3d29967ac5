"""Who may import whom: between the packages, between the rooms of each, and from outside. What a room lists.

Every import counts, also one inside a function or under ``TYPE_CHECKING``. ``tests/house.py`` has the rooms.
"""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.house import BOUNDS, FLOORS, PAGE, ROOT, drawn

PACKAGES = ("backend", "bridge", "configs", "rollout", "slurm")
HEAVY = {"torch", "ray", "sglang", "megatron", "transformers", "matplotlib"}

FORBIDDEN = {
    "configs": {"backend", "bridge", "rollout"} | HEAVY,
    "bridge": {"backend", "rollout", "ray", "sglang", "megatron", "transformers"},
    "rollout": {"backend", "bridge", "megatron"},
    "slurm": {"backend", "bridge", "configs", "rollout"} | (HEAVY - {"ray"}),
    "backend": set[str](),
}
"""What no module of a package may import: packages of ours, and libraries."""

ALIAS = "slipstream.rollout.compat.slime.alias."
"""The package ``slime`` that hooks import where no checkout of slime is. Its names for ranks use Megatron."""

LEAVES = {
    "slipstream.rollout.compat.slime": "slipstream.rollout.compat.hooks",
    "slipstream.backend.trainer.slime": "slipstream.backend.trainer.hooks",
}
"""Rooms that no import leads to, and the one module that names each, by import paths."""

PURE = {
    "slipstream.rollout.control": {"asyncio", "sqlite3", "numpy", "threading"},
    "slipstream.rollout.gateway.sessions": {"asyncio", "sqlite3", "threading", "time", "random", "secrets"},
}
"""What is decided without clocks, tasks, arrays and disks."""

CPU_SUPPORT = {
    "slipstream.backend.megatron.cpu": "slipstream.backend.megatron.parallel",
    "slipstream.rollout.engine.cpu": "slipstream.rollout.engine.server_process",
}
"""The CPU support of a library, and the one module that may import it."""


@cache
def modules() -> dict[str, Path]:
    """Every module of the product, by its import name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "stand_ins" in path.parts:  # named like the libraries that they stand for
                continue
            parts = ("slipstream", *path.relative_to(ROOT).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(name: str) -> frozenset[str]:
    """Every module that is imported anywhere in ``name``; ``from a import b`` counts as a and as a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def package_of(name: str) -> str:
    """``backend`` for ``slipstream.backend.x``, and the name of the library for one from outside."""
    first, _, rest = name.partition(".")
    return rest.partition(".")[0] if first == "slipstream" else first


def room_of(name: str, house: str) -> str | None:
    """The room of a module in a package or folder; None for one outside of it, and for its ``__init__``."""
    start = f"slipstream.{house.replace('/', '.')}."
    return name.removeprefix(start).partition(".")[0] if name.startswith(start) else None


def arrows(house: str) -> dict[tuple[str, str], list[str]]:
    """By (importing room, imported room) within ``house``: the imports that draw the arrow."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in modules():
        above = room_of(name, house)
        if above is None:
            continue
        for target in sorted(imports(name)):
            below = room_of(target, house)
            if below is not None and below != above:
                found.setdefault((above, below), []).append(f"{name} imports {target}")
    return found


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_a_package_imports_only_what_lies_below_it(package):
    names = [name for name in modules() if package_of(name) == package]
    assert names
    wrong = [
        f"{name} imports {target}"
        for name in names
        for target in imports(name)
        if package_of(target) in FORBIDDEN[package] - ({"megatron"} if name.startswith(ALIAS) else set())
    ]
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_is_named_by_its_registry_alone(leaf):
    outside = [name for name in modules() if not name.startswith(tuple(LEAVES))]
    assert len(outside) > 100
    wrong = [
        f"{name} imports {leaf}" for name in outside if any(each.startswith(leaf) for each in imports(name))
    ]
    assert not wrong, "\n".join(wrong)
    assert {name for name in outside if leaf in modules()[name].read_text()} == {LEAVES[leaf]}


@pytest.mark.parametrize("house", sorted(FLOORS))
def test_no_import_runs_up_or_along_a_floor(house):
    floor_of = {room: number for number, rooms in enumerate(FLOORS[house]) for room in rooms}
    rooms = {room_of(name, house) for name in modules()} - {None}
    assert rooms == set(floor_of), "the drawing and the folders differ"
    up = [
        text
        for (above, below), texts in arrows(house).items()
        for text in texts
        if floor_of[below] >= floor_of[above]
    ]
    assert not up, "\n".join(up)


@pytest.mark.parametrize("house", sorted(BOUNDS))
def test_a_house_stays_small_enough_to_be_held(house):
    floors, most = FLOORS[house], BOUNDS[house]
    assert sum(map(len, floors)) <= most.rooms
    assert len(floors) <= most.floors
    assert len(arrows(house)) <= most.arrows


def test_the_page_shows_the_house_that_is_tested():
    page = PAGE.read_text(encoding="utf-8")
    assert page == drawn(page), "the house has changed: python -m tests.house"


@pytest.mark.parametrize("package", ["bridge", "configs"])
def test_there_is_no_circle_between_the_rooms_of_a_package(package):
    below: dict[str, set[str]] = {}
    for above, lower in arrows(package):
        below.setdefault(above, set()).add(lower)
    done: set[str] = set()

    def walk(room: str, way: tuple[str, ...]) -> None:
        assert room not in way, " -> ".join([*way, room])
        if room not in done:
            for lower in below.get(room, ()):
                walk(lower, (*way, room))
            done.add(room)

    for room in below:
        walk(room, ())


@pytest.mark.parametrize("folder", sorted(PURE))
def test_what_decides_imports_no_clock_task_array_or_disk(folder):
    wrong = [
        f"{name} imports {target}"
        for name in modules()
        if name.startswith(f"{folder}.")
        for target in imports(name)
        if target.partition(".")[0] in PURE[folder]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_product_imports_itself_by_its_own_name_and_neither_tests_nor_benchmarks():
    strangers = {*PACKAGES, "tests", "benchmarks", "examples"}
    wrong = [
        f"{name} imports {target}"
        for name in modules()
        for target in imports(name)
        if target.partition(".")[0] in strangers
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("support", sorted(CPU_SUPPORT))
def test_cpu_support_is_imported_by_one_module_only(support):
    assert {name for name in modules() if support in imports(name)} == {CPU_SUPPORT[support]}


def test_sglang_is_imported_only_where_its_server_is_launched_or_its_endpoints_and_parsers_are_used():
    importers = {
        name
        for name in modules()
        if package_of(name) != "configs" and any(package_of(target) == "sglang" for target in imports(name))
    }
    assert {name for name in importers if not name.startswith("slipstream.rollout.gateway.serving.")} <= {
        "slipstream.rollout.engine.launch",
        "slipstream.rollout.engine.adapters",
        "slipstream.rollout.engine.cpu",
        "slipstream.rollout.engine.dead_ends",
        "slipstream.rollout.engine.whole_calls",
        "slipstream.rollout.workflow.environment.tools",
    }


ROOMS = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for name, path in modules().items()
    if path.name == "__init__.py" and not name.startswith(ALIAS)
)


@pytest.mark.parametrize("room", ROOMS)
def test_the_list_of_the_files_of_a_room_is_complete(room):
    """A file that is added, moved or renamed belongs into the list, if the room has one in its docstring."""
    files = {path.stem for path in (ROOT / room).glob("*.py")} - {"__init__"}
    text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""
    listed = set(re.findall(r"^ *([a-z0-9_]+) {2,}\S", text, re.M)) & files
    if len(listed) > len(files) / 2:
        assert files <= set(re.findall(r"\w+", text))


def test_no_two_classes_share_a_name():
    owners: dict[str, list[str]] = {}
    for name, path in modules().items():
        if name.startswith(ALIAS):  # whose names are slime's
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners.setdefault(node.name, []).append(name)
    shared = {name: where for name, where in owners.items() if len(where) > 1}
    assert not shared, shared


def test_a_wheel_has_every_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    tops = ("backend", "bridge", "configs", "rollout", "slurm")
    folders = [path.parent.relative_to(ROOT) for top in tops for path in (ROOT / top).rglob("__init__.py")]
    # Packages in a folder that is none are data, and ``backend/api`` is the package ``slipstream`` itself.
    found = {folder for folder in folders if set(folder.parents[:-1]) <= set(folders)}
    named = {".".join(("slipstream", *folder.parts)) for folder in found}
    assert named - listed == {"slipstream.backend.api"}


def loaded_after(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after ``code``."""
    script = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return set(ended.stdout.split())


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("from slipstream.backend.driver import run", {"ray"}),
        ("from slipstream.backend.cli import app", set()),
        ("from slipstream.backend.commands import diagnose", set()),
        ("from slipstream.backend.commands import check, program_checks, submit", set()),
        ("from slipstream.backend.simulate import command", HEAVY - {"matplotlib"}),
        ("from slipstream.configs import load, rules, installed", set()),
        (
            "from slipstream.bridge import families\n"
            "from slipstream.bridge.publish import endpoint, report\n"
            "from slipstream.bridge.shards import check, plan",
            set(),
        ),
        ("import slipstream", set()),
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(code, allowed):
    assert not loaded_after(code) & (HEAVY - allowed)


def test_the_client_of_a_gateway_loads_httpx_and_nothing_of_a_run():
    loaded = loaded_after("import slipstream.client")
    assert loaded - loaded_after("import asyncio, httpx, inspect, pathlib, uuid") <= {"slipstream"}
