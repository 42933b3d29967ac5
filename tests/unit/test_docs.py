"""The pages of the documentation: their links, their paths, their form, and the site that is made of them."""

import html
import importlib
import json
import os
import pydoc
import re
import subprocess
import sys
import tomllib
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from slipstream.backend.commands.reference import metric_chapters, setting_chapters
from slipstream.backend.monitor.tags import TAGS
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.paths import schema_paths
from slipstream.configs.schema.supervised import SupervisedConfig
from tests.environment import ROOT
from tests.pages import LANGUAGES, PAGES, anchors, blocks, code_in_sentences, links, tokens

PATH = re.compile(
    r"(?<![\w./-])((?:backend|bridge|configs|rollout|slurm|tests|benchmarks|docs)/[\w./-]*\w(?:\.(?:py|md|sh|sbatch|yaml|txt|png))?)"
)
TO_COME = {"bridge/families/NAME.py"}
"""A placeholder."""

MODULE = re.compile(r"``?((?:slipstream\.)?(?:backend|bridge|configs|rollout|slurm)(?:\.\w+)+)``?")
SETTINGS = schema_paths(RunConfig)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@each_page
def test_every_path_that_a_page_names_exists(page: Path):
    named = {match.rstrip(".") for match in PATH.findall(page.read_text())} - TAGS.keys()
    assert not {path for path in named - TO_COME if not (ROOT / path).exists()}


OTHERS = ("migration.md",)
"""Pages that name settings of other systems."""

NO_SETTINGS = {
    "actor.recompute_logprob": "AReaL's name",
    "checkpoint.json": "a file",
    "model.safetensors": "a file",
}


SETTINGS = {
    ".".join(path.split(".")[:length])
    for schema in (RunConfig, SupervisedConfig)
    for path in schema_paths(schema)
    for length in range(1, path.count(".") + 2)
}
"""Every setting and section. A section whose names are those of another library has no names here."""


@each_page
def test_every_setting_and_every_object_that_a_sentence_names_exists(page: Path):
    names = {re.split("[:=(]", code)[0] for code in code_in_sentences(page)} - set(NO_SETTINGS)
    settings = {name for name in names if re.fullmatch(r"[a-z]+(\.[a-z_0-9]+)+", name)}
    settings = {name for name in settings if name.partition(".")[0] in RunConfig.model_fields}
    objects = {name for name in names if re.fullmatch(r"slipstream(\.\w+)+", name)}
    objects |= {f"slipstream.{name}" for name in names if re.fullmatch(r"(rollout|backend)(\.\w+)+", name)}
    unknown = {name for name in objects if not is_object(name)}
    unknown |= {name for name in settings - SETTINGS if not is_object(f"slipstream.{name}")}
    unknown -= {f"slipstream.{name}" for name in SETTINGS}
    assert page.name in OTHERS or not unknown


def is_object(name: str) -> bool:
    """True if ``name`` is a module, or an attribute of what the name before its last dot stands for."""
    try:
        importlib.import_module(name)
    except ImportError:
        parent, _, attribute = name.rpartition(".")
        return bool(parent) and is_object(parent) and hasattr(pydoc.locate(parent), attribute)
    return True


@each_page
def test_every_link_of_a_page_leads_to_a_file_and_to_a_heading_of_it(page: Path):
    wrong = set()
    for link in links(page):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.add(link)
    assert not wrong


@each_page
def test_every_block_of_code_says_its_language(page: Path):
    assert not {str(block): block.language for block in blocks(page) if block.language not in LANGUAGES}


@each_page
def test_every_table_has_a_header(page: Path):
    lines = page.read_text(encoding="utf-8").splitlines()
    rules = [pair for pair in pairwise(lines) if re.fullmatch(r"\s*\|(\s*:?-{3,}:?\s*\|)+", pair[1])]
    assert not [rule for above, rule in rules if not above.lstrip().startswith("|")]


def test_every_python_file_that_a_docstring_names_exists():
    wrong = {
        (path.relative_to(ROOT).as_posix(), name)
        for package in ("backend", "bridge", "configs", "rollout", "slurm", "tests", "benchmarks")
        for path in (ROOT / package).rglob("*.py")
        for name in PATH.findall(path.read_text())
        if name.endswith((".py", ".md", ".sbatch")) and name not in TO_COME and not (ROOT / name).exists()
    }
    assert not wrong


def exists(name: str) -> bool:
    """Say whether a dotted name is a setting, or a module of ours with this name in its text."""
    parts = name.removeprefix("slipstream.").split(".")
    if any(f"{setting}.".startswith(f"{'.'.join(parts)}.") for setting in SETTINGS):
        return True
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                rest = parts[length : length + 1]
                return not rest or re.search(rf"\b{rest[0]}\b", file.read_text(encoding="utf-8")) is not None
    return False


def test_every_module_that_a_docstring_or_a_page_names_exists():
    wrong = {
        (path.relative_to(ROOT).as_posix(), name)
        for folder in ("backend", "bridge", "configs", "rollout", "slurm", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".md"} and path.name != "migration.md"  # which has settings of others
        for name in MODULE.findall(path.read_text(encoding="utf-8"))
        if not exists(name)
    }
    assert not wrong


def test_the_glossary_has_each_term_once():
    terms = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.M)
    assert len(terms) > 50 and not [term for term, times in Counter(terms[2:]).items() if times > 1]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site as ``make docs`` builds it: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", "docs/site/mkdocs.yml"]
    said = subprocess.run(
        [*build, "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert said.returncode == 0, f"{said.stdout}{said.stderr}\nIs it installed? `make docs` does that."
    return folder


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent == ROOT / "docs"], ids=lambda page: page.name
)
def test_the_site_reads_a_page_as_github_does(page: Path, site: Path):
    whole = (site / page.with_suffix(".html").name).read_text(encoding="utf-8")
    [text] = re.findall(r"<article.*?</article>", whole, re.DOTALL)
    kinds = Counter(token.type.removesuffix("_open") for token in tokens(page))
    names = {"table": "table", "tr": "tr", "fence": "pre", "list_item": "li", "blockquote": "blockquote"}
    shown = {kind: len(re.findall(rf"<{tag}[ >]", text)) for kind, tag in names.items()}
    assert shown == {kind: kinds[kind] for kind in names}


REFERENCE = ("settings.html", "metrics_reference.html")
"""Pages of the site that are made of the schema and of the tags."""


def rows(page: Path) -> dict[str, list[str]]:
    """The cells of each row of a reference page as text, by the anchor of the row."""
    found = re.findall(
        r'<tr>\s*<td><a id="([^"]+)"></a>(.*?)</tr>', page.read_text(encoding="utf-8"), re.DOTALL
    )
    return {
        anchor: [
            " ".join(html.unescape(re.sub(r"<[^>]*>", "", cell)).split())
            for cell in re.split(r"</td>\s*<td>", row)
        ]
        for anchor, row in found
    }


def plain(text: str) -> str:
    """Text of a setting or metric as the site shows it, without marks and without links to pages."""
    return re.sub(r"docs/(\w+)\.md[#\w-]*", lambda page: page[1].replace("_", " "), text).replace("`", "")


def test_the_site_has_every_setting_and_every_metric_with_what_the_commands_say(site: Path):
    settings, metrics = (rows(site / name) for name in REFERENCE)
    run = {entry.name: entry for chapter in setting_chapters(RunConfig) for entry in chapter.entries}
    sft = {
        f"sft:{entry.name}": entry
        for chapter in setting_chapters(SupervisedConfig)
        for entry in chapter.entries
        if entry != run.get(entry.name)
    }
    tags = {entry.name: entry for chapter in metric_chapters() for entry in chapter.entries}
    for shown, expected in ((settings, run | sft), (metrics, tags)):
        assert shown == {
            anchor: [entry.name, *map(plain, entry.facts), plain(entry.meaning)]
            for anchor, entry in expected.items()
        }


def test_the_site_has_every_section_and_group_under_its_heading(site: Path):
    for name, chapters in zip(REFERENCE, (setting_chapters(RunConfig), metric_chapters()), strict=True):
        text = (site / name).read_text(encoding="utf-8")
        for chapter in chapters:
            assert f'id="{chapter.name.replace(".", "")}">{chapter.name}<' in text


def test_the_site_links_the_name_of_a_setting_or_metric_to_its_row(site: Path):
    data = (site / "data.html").read_text(encoding="utf-8")
    assert '<a href="settings.html#data"><code>slipstream settings data</code></a>' in data
    metrics = (site / "metrics.html").read_text(encoding="utf-8")
    assert 'href="metrics_reference.html#train/ess"' in metrics
    assert 'href="settings.html#rollout.max_head_offpolicyness"' in metrics
    readme = (site / "repository/index.html").read_text(encoding="utf-8")
    assert 'href="../settings.html#rollout.max_head_offpolicyness"' in readme
    places = re.findall(r'href="(settings|metrics_reference)\.html#([^"]+)"', data + metrics)
    anchors = {name.removesuffix(".html"): (site / name).read_text(encoding="utf-8") for name in REFERENCE}
    assert len(places) > 10
    assert not [place for name, place in places if f'id="{place}"' not in anchors[name]]


def test_the_site_loads_nothing_from_elsewhere(site: Path):
    elsewhere = r"(?:<(?:script|img|iframe|source)[^>]* src|<link[^>]* href|url\()\W{,2}(?:\w+:)?//[^\s>]*"
    files = [file for kind in ("*.html", "*.css") for file in site.rglob(kind)]
    assert len(files) > 100
    assert not {hit for file in files for hit in re.findall(elsewhere, file.read_text(encoding="utf-8"))}


def test_files_beside_the_pages_are_pages_of_the_site(site: Path):
    code = (site / "repository/examples/reward/closeness.py.html").read_text(encoding="utf-8")
    assert "Closeness" in code
    guide = (site / "customization.html").read_text(encoding="utf-8")
    assert 'href="repository/examples/reward/closeness.py.html"' in guide
    assert (site / "repository/index.html").exists(), "the README"
    assert (site / "repository/examples/quickstart.ipynb.html").exists()


def test_every_page_of_the_site_is_found_by_its_search(site: Path):
    places = {
        each["location"].partition("#")[0]
        for each in json.loads((site / "search/search_index.json").read_text())["docs"]
    }
    pages = {page.with_suffix(".html").name for page in PAGES if page.parent == ROOT / "docs"}
    mapped = {f"migration/{path.stem}.html" for path in (ROOT / "rollout/compat/imports").glob("*.yaml")}
    assert places == pages | set(REFERENCE) | mapped


def test_the_citation_is_that_of_the_package():
    citation = yaml.safe_load((ROOT / "docs/CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys(), "what CFF 1.2.0 requires"
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["authors"] == [{"name": "The Slipstream authors"}]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
