"""Docs, docstrings and comments name files that exist."""

import re
from pathlib import Path

import pytest

from tests.environment import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")])
PATH = re.compile(
    r"(?<![\w./-])((?:backend|bridge|configs|rollout|slurm|tests|benchmarks|docs)/[\w./-]*\w(?:\.(?:py|md|sh|sbatch|yaml|txt|png))?)"
)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
TO_COME = {
    "bridge/families/NAME.py",
    "rollout/gateway",
    "rollout/environment",
    "rollout/compat/slime",
}
"""Rooms that the architecture names before they exist, and a placeholder."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page: Path):
    if page.name in (
        "CHANGELOG.md",
        "metrics.md",
    ):  # they name what was, and tags such as rollout/retractions
        return
    named = {match.rstrip(".") for match in PATH.findall(page.read_text())}
    assert not {path for path in named - TO_COME if not (ROOT / path).exists()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path):
    links = {link for link in LINK.findall(page.read_text()) if not link.startswith("http")}
    assert not {link for link in links if not (page.parent / link).exists()}


def test_every_python_file_that_a_docstring_names_exists():
    wrong = {
        (path.relative_to(ROOT).as_posix(), name)
        for package in ("backend", "bridge", "configs", "rollout", "slurm", "tests", "benchmarks")
        for path in (ROOT / package).rglob("*.py")
        for name in PATH.findall(path.read_text())
        if name.endswith((".py", ".md", ".sbatch")) and name not in TO_COME and not (ROOT / name).exists()
    }
    assert not wrong
