"""The pages of the documentation as data: their blocks of code, commands, links and headings.

Markdown is read as GitHub reads it, by markdown-it, which rich brings.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.environment import ROOT

PAGES = tuple(
    sorted(
        [
            ROOT / "README.md",
            *(ROOT / "docs").glob("*.md"),
            *(page for folder in ("benchmarks", "examples") for page in (ROOT / folder).rglob("*.md")),
        ]
    )
)

LANGUAGES = ("bash", "console", "json", "python", "text", "yaml")
"""Languages of blocks of code."""

# What no test checks, and why; everything else in a block of code is checked. `text` is a diagram, a formula
# or the output of a program, whose figures differ from run to run: only that of a wrong recipe is compared.

PROGRAMS = {
    "aider": "an agent",
    "apptainer": "builds an image",
    "cat": "reads a file",
    "cd": "changes the folder",
    "claude": "an agent",
    "cline": "an agent",
    "curl": "asks a running gateway",
    "docker": "builds or runs an image; a command of Slipstream in it is checked",
    "echo": "writes a file",
    "enroot": "builds an image",
    "grep": "reads a file",
    "hf": "downloads models and data",
    "ls": "reads a folder",
    "openssl": "makes a random key",
    "pip": "downloads packages",
    "qwen": "an agent",
    "ray": "a command of the library Ray",
    "salloc": "starts a process in an allocation; a command of Slipstream in it is checked",
    "sbatch": "submits a job",
    "scontrol": "asks for a running job",
    "sh": "lays out a toolkit of GPUs",
    "source": "changes the shell",
    "srun": "starts a process in a job; a command of Slipstream in it is checked",
    "tail": "reads a file",
    "tensorboard": "serves until it is ended",
}
"""Programs of others, whose arguments no test checks, and what they do."""

NOT_RUN = {
    "audit": "needs a ledger: tests/unit/test_commands_audit.py",
    "convert": "needs a model: tests/integration/test_convert.py",
    "doctor": "its exit code is that of the machine: tests/unit/test_cli.py",
    "engine": "needs a run that trains: tests/runs/test_elastic.py",
    "eval": "starts an engine: tests/runs",
    "serve": "starts a run: tests/runs",
    "sft": "starts a run: tests/runs",
    "simulate": "takes a minute: tests/unit/test_simulate_command.py",
    "submit": "needs Slurm: tests/cluster; with --print it is run",
    "train": "starts a run: tests/runs",
    "try": "starts an engine: tests/runs",
}
"""Commands of Slipstream in blocks of code that are not run here, and where they are run."""

NOT_INSTALLED = {"pandas": "the tests need it for nothing else"}
"""Packages that examples import and that no test can look into."""


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    page: Path
    line: int
    language: str
    """Empty: the page does not say."""
    code: str
    source: str
    """File of which the block is an excerpt, by a comment ``<!-- PATH -->`` before it; else empty."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a page, as a shell would split it."""

    place: str
    words: tuple[str, ...]
    is_whole: bool
    """False: named in a sentence, where arguments may be left out."""

    @property
    def program(self) -> str:
        return self.words[0].rpartition("bin/")[2]

    def __str__(self) -> str:
        return f"{self.place} {shlex.join(self.words)}"


@cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path) -> Iterator[Block]:
    source = ""
    for token in tokens(page):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            yield Block(page, token.map[0] + 1, token.info.strip(), token.content, source)
        comment = re.fullmatch(r"<!-- (\S+/\S+) -->\n?", token.content)
        source = comment[1] if comment and token.type == "html_block" else ""


def all_blocks(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


def code_in_sentences(page: Path) -> Iterator[str]:
    yield from (token.content for token in _inline(page) if token.type == "code_inline")


def _inline(page: Path) -> Iterator[Token]:
    for token in tokens(page):
        yield from token.children or ()


def links(page: Path) -> Iterator[str]:
    for token in _inline(page):
        target = token.attrs.get("href") or token.attrs.get("src")
        if target:
            yield str(target)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Names of the headings of a page, as GitHub makes them."""
    times: Counter[str] = Counter()
    names = set()
    parts = tokens(page)
    for opened, heading in pairwise(parts):
        if opened.type == "heading_open":
            text = "".join(child.content for child in heading.children or ())
            name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            names.add(f"{name}-{times[name]}" if times[name] else name)
            times[name] += 1
    return frozenset(names)


def commands(page: Path) -> Iterator[Command]:
    """Yield the commands of a page: those of its blocks for a shell, and those that its sentences name."""
    for block in blocks(page):
        if block.language in ("bash", "console"):
            for words in shell_commands(block.code, is_session=block.language == "console"):
                yield Command(str(block), words, is_whole=True)
    for code in code_in_sentences(page):
        if re.match(r"(slipstream|make|pytest|python -m|\S*bin/\w+) \S", code):
            start, *others = code.split(" | ")
            for text in [start, *(f"{start.rpartition(' ')[0]} {other}" for other in others)]:
                for words in shell_commands(text):
                    yield Command(page.relative_to(ROOT).as_posix(), words, is_whole=False)


def shell_commands(code: str, *, is_session: bool = False) -> Iterator[tuple[str, ...]]:
    """Yield the simple commands of a script, without variables and redirections; also those in ``$(...)``."""
    if is_session:
        code = "\n".join(line[2:] for line in code.splitlines() if line.startswith("$ "))
    code = code.replace("\\\n", " ")
    for line in code.splitlines():
        for inner in re.findall(r"\$\(([^()]*)\)", line):
            yield from shell_commands(inner)
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|"):
                if words and words[0] != "export":
                    yield tuple(words[: words.index(">")] if ">" in words else words)
                words = []
            elif words or not re.match(r"\w+=", word):
                words.append(word)
