"""docker/Dockerfile, as far as it can be checked without a daemon: its files, versions and shell code."""

import fnmatch
import re
import shlex
import subprocess

import pytest

from slipstream.configs.installed.environment import pinned
from tests.environment import ROOT

TEXT = (ROOT / "docker" / "Dockerfile").read_text()
KNOWN = {"ARG", "FROM", "SHELL", "ENV", "COPY", "RUN", "ENTRYPOINT", "CMD", "WORKDIR"}


def instructions() -> list[tuple[str, str]]:
    """The instructions with their arguments; continued lines are joined."""
    lines = [line for line in TEXT.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    parts = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, rest.strip()) for name, _, rest in parts]


def arguments(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def copied() -> list[tuple[str, str]]:
    """The sources and targets of every COPY."""
    pairs = []
    for rest in arguments("COPY"):
        *sources, target = [word for word in shlex.split(rest) if not word.startswith("--")]
        pairs += [(source, target) for source in sources]
    return pairs


def test_every_instruction_is_known():
    names = [name for name, _ in instructions()]
    assert set(names) <= KNOWN
    assert names[:2] == ["ARG", "FROM"] and names.count("FROM") == 1


@pytest.mark.parametrize("source", [source for source, _ in copied()])
def test_everything_that_is_copied_exists_and_is_in_the_build_context(source):
    assert (ROOT / source).exists()
    rules = (ROOT / ".dockerignore").read_text().split()
    assert rules[0] == "*"
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    assert any(source == rule or source.startswith(f"{rule}/") for rule in kept)


def test_everything_that_the_package_is_built_from_is_copied():
    from tests.wheels import PARTS

    assert set(PARTS) <= {source for source, _ in copied()}


def test_nothing_that_is_copied_is_left_out_again():
    rules = [rule for rule in (ROOT / ".dockerignore").read_text().split()[1:] if not rule.startswith("!")]
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    ).stdout.split()
    assert rules and not [path for path in tracked if any(fnmatch.fnmatch(path, rule) for rule in rules)]


def test_the_base_image_is_the_release_of_sglang_that_is_pinned():
    [version] = [rest.partition("=")[2] for rest in arguments("ARG") if rest.startswith("SGLANG=")]
    assert version == pinned("gpu")["sglang"]
    assert arguments("FROM") == ["lmsysorg/sglang:v${SGLANG}"]


def test_no_version_is_written_but_those_of_the_pins():
    assert not re.findall(r"==\s*\d", TEXT)


def test_the_pins_are_installed_before_the_project_and_checked_and_recorded_behind_it():
    steps = " && ".join(arguments("RUN"))
    order = [
        "install-gpu.sh",
        "pip install --no-deps",
        "environment.py gpu",
        "environment.py --check gpu",
        "ray",
    ]
    places = [steps.index(step) for step in order]
    assert places == sorted(places)


@pytest.mark.parametrize("code", arguments("RUN"))
def test_the_shell_code_is_valid(code):
    subprocess.run(["bash", "-n", "-c", code], check=True, timeout=240)


@pytest.mark.parametrize("script", ["install-gpu.sh", "kind.sh", "lock-gpu.sh"])
def test_the_scripts_of_the_environment_are_valid(script):
    subprocess.run(["sh", "-n", str(ROOT / "configs/environment" / script)], check=True, timeout=240)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ("sys.version_info = (3, 11, 2)", "3.12 needed"),
        ("platform.machine = lambda: 'aarch64'", "x86_64 needed"),
        ("os.confstr = lambda name: 'glibc 2.28'", "glibc 2.34 or newer needed"),
        ("os.confstr = lambda name: None", "glibc 2.34 or newer needed"),
        ("pass", None),
    ],
)
def test_a_machine_that_the_packages_do_not_run_on_is_refused_before_anything_is_installed(
    machine, reason, tmp_path
):
    import sys

    python = tmp_path / "python"
    fit = "sys.version_info = (3, 12, 1); platform.machine = lambda: 'x86_64'"
    library = "os.confstr = lambda name: 'glibc 2.36'"
    start = f"import os, platform, sys; {fit}; {library}; {machine}; exec(sys.stdin.read())"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c {shlex.quote(start)}\n")
    python.chmod(0o755)
    ended = subprocess.run(
        ["sh", str(ROOT / "configs/environment/install-gpu.sh"), "--check", str(python)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == (1 if reason else 0), ended.stderr
    assert (reason or "") in ended.stderr
