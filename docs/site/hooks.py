"""What MkDocs does not know of these pages: links into the repository, names of settings, and long names.

Pages in ``docs/`` link to files beside that folder, such as ``../examples/reward/closeness.py``. Each of
these files, and each file that it links to in turn, becomes a page of the site below ``repository/``:
Markdown and notebooks as they read, folders as lists, everything else as code. No page is stored, nor are
the pages of settings and metrics, which ``reference.py`` writes.
"""

import ast
import json
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
ASSETS = Path(__file__).parent / "assets"

BELOW = "repository"
"""Folder of the site with the pages of the repository's files."""

FENCED = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)(?P<target>[^)#\s]+)(?=#[^)\s]*\)|\))")
LINK_OR_CODE = re.compile(r"(?m)^#.*$|!?\[(?:[^\]`]|`[^`\n]*`)*\]\([^)\n]*\)|`([^`\n]+)`")
"""Headings and links are matched whole, so that no code in them becomes a link."""
INLINE_CODE = re.compile(r"<code>([^<\n]+)</code>")
BREAKABLE = r"\1<wbr>"
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".toml": "toml"}
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
"""Front matter of a page that the search leaves out: what it would find is found in the docs."""

_origins: dict[str, str] = {}
"""Path in the repository of each page that is made from a file outside ``docs/``, by its path in the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, a page for every file of the repository that a page links to, and the assets."""
    for uri, content in reference.pages().items():
        files.append(File.generated(config, uri, content=content))
    waiting = [f"docs/{page.src_uri}" for page in files.documentation_pages() if not page.generated_by]
    reached = set(waiting)
    while waiting:
        path = waiting.pop()
        for link in LINK.finditer(FENCED.sub("", _markdown(path))):
            target = _resolved(path, link["target"])
            if target in reached or target.startswith("docs/") or not (ROOT / target).exists():
                continue
            reached.add(target)
            if target.endswith(".png"):
                files.append(File.generated(config, _site_path(target), abs_src_path=str(ROOT / target)))
                continue
            waiting.append(target)
            _origins[_site_path(target)] = target
            content = UNSEARCHED + _markdown(target)
            files.append(
                File.generated(
                    config, _site_path(target), content=content, inclusion=InclusionLevel.NOT_IN_NAV
                )
            )
    for asset in sorted(ASSETS.iterdir()):
        files.append(File.generated(config, f"assets/{asset.name}", abs_src_path=str(asset)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page at the pages of this site, and link the names of settings and metrics."""
    uri = page.file.src_uri
    if "\n## " not in markdown:
        page.meta["hide"] = ["toc"]
    path = _origins.get(uri, f"docs/{uri}")

    def moved(link: re.Match[str]) -> str:
        target = _resolved(path, link["target"])
        if not (ROOT / target).exists():
            return link["target"]  # MkDocs warns of it
        return posixpath.relpath(_site_path(target), posixpath.dirname(uri) or ".")

    def explained(part: re.Match[str]) -> str:
        place = reference.place(part[1]) if part[1] else None
        return f"[{part[0]}]({posixpath.relpath(place, posixpath.dirname(uri) or '.')})" if place else part[0]

    return _outside_code(markdown, lambda text: LINK_OR_CODE.sub(explained, LINK.sub(moved, text)))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let names such as ``rollout.engine.args`` break behind their dots: tables then fit on small screens."""
    return INLINE_CODE.sub(lambda code: f"<code>{re.sub(r'([./_]+)', BREAKABLE, code[1])}</code>", html)


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for block in FENCED.finditer(markdown):
        parts += [change(markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(markdown[end:])])


def _resolved(path: str, target: str) -> str:
    """Path in the repository of what a link leads to; the README of a folder that has one."""
    folder = path if (ROOT / path).is_dir() else posixpath.dirname(path)
    resolved = posixpath.normpath(posixpath.join(folder, target))
    return f"{resolved}/README.md" if (ROOT / resolved / "README.md").exists() else resolved


def _site_path(path: str) -> str:
    """Path in the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{BELOW}/{path}/index.md"
    return f"{BELOW}/{path}" if path.endswith((".md", ".png")) else f"{BELOW}/{path}.md"


def _markdown(path: str) -> str:
    """Return a file or folder of the repository as Markdown."""
    file = ROOT / path
    if file.is_dir():
        return _listing(file)
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    if file.suffix == ".ipynb":
        return "\n\n".join(_cell(cell) for cell in json.loads(text)["cells"])
    return f"# {file.name}\n\n`{path}`\n\n{_fenced(text, LANGUAGES.get(file.suffix, 'text'))}"


def _cell(cell: dict[str, object]) -> str:
    source = cell["source"]
    text = "".join(source) if isinstance(source, list) else str(source)
    return text if cell["cell_type"] == "markdown" else _fenced(text, "python")


def _fenced(text: str, language: str) -> str:
    fence = "`" * (1 + max([2, *(len(ticks) for ticks in re.findall("`+", text))]))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _listing(folder: Path) -> str:
    entries = [each for each in sorted(folder.iterdir()) if not each.name.startswith((".", "__pycache__"))]
    lines = [f"- [{each.name}]({each.name}){_purpose(each)}" for each in entries]
    return f"# {folder.name}\n\n`{folder.relative_to(ROOT)}`\n\n" + "\n".join(lines) + "\n"


def _purpose(file: Path) -> str:
    if file.suffix != ".py":
        return ""
    purpose = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return f": {purpose.splitlines()[0]}" if purpose else ""
