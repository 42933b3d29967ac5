"""Every command that a page names exists with its arguments, and the cheap ones do what the page says."""

import argparse
import ast
import contextlib
import importlib.util
import io
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer
from typer.testing import CliRunner

from slipstream.backend.cli.app import app
from slipstream.backend.commands.init import init
from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.commands.reference import metric_chapters, selected, setting_chapters
from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.configs.load import load_recipe, load_supervised
from slipstream.configs.published import MODELS
from slipstream.configs.schema import RunConfig
from slipstream.configs.violations import RecipeError
from tests.environment import ROOT
from tests.models import make_checkpoint
from tests.pages import NOT_RUN, PAGES, PROGRAMS, Command, commands
from tests.unit.run_folders import make_run
from tests.unit.test_imports import FILES

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
ROLLOUT, SUPERVISED = (
    ROOT / f"configs/recipes/{name}.yaml" for name in ("simulate-areal", "sft-qwen3-4b-1n8g-dp8")
)
"""Recipes to which the settings of commands are added."""

SCRIPT = """python3 train.py --hf-checkpoint /data/tiny --prompt-data /data/train.jsonl \\
    --rm-type deepscaler --num-rollout 30 --rollout-batch-size 8 --n-samples-per-prompt 4
"""
"""A launch script of slime."""

LEFT_OUT = ("...", "…")
"""What stands in a sentence for arguments that are left out."""


@cache
def command_line() -> tuple[Any, dict[str, Any]]:
    """Return ``slipstream`` with commands that do nothing but leave their arguments in the mapping."""
    root, values = typer.main.get_command(app), {}
    waiting = [root]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        if not hasattr(command, "commands"):
            command.callback = lambda **read: values.update(read)
    return root, values


def read_by_slipstream(words: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    """Return the arguments as the command line reads them, and its complaints."""
    root, values = command_line()
    values.clear()
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            root.main(list(words), prog_name="slipstream")
        except SystemExit as end:
            return values, said.getvalue() if end.code else ""
    return values, ""


def problems_of_slipstream(words: tuple[str, ...], is_whole: bool) -> Iterator[str]:
    group = getattr(command_line()[0].commands.get(words[0]), "commands", {})
    if not is_whole and group and len(words) > 1 and words[1].startswith("-"):
        words = (words[0], next(iter(group)), *words[1:])  # an option that its commands share
    values, complaint = read_by_slipstream(words)
    is_unfinished = len(words) == 1 or "Missing" in complaint or "requires an argument" in complaint
    if complaint and (is_whole or not is_unfinished):
        yield complaint
    recipe = values.get("recipe", "RECIPE")
    if not re.fullmatch(r"RECIPE|[\w.-]+\.yaml|runs/.+", recipe):  # what pages call the reader's own
        places = (ROOT / recipe, ROOT / f"configs/recipes/{recipe}.yaml")
        yield from () if any(place.is_file() for place in places) else [f"no recipe {recipe}"]
    settings = [word for word in values.get("overrides") or () if "=" in word and word != "key=value"]
    if settings:
        yield from problems_of_settings(settings, is_supervised=words[0] == "sft")
    if words[0] in ("settings", "metrics"):
        yield from problems_of_names(words[0], values.get("names") or ())


def problems_of_names(command: str, names: Iterable[str]) -> Iterator[str]:
    chapters = metric_chapters() if command == "metrics" else setting_chapters(RunConfig)
    try:
        selected(chapters, [name for name in names if name != "[NAME]"])
    except WrongInput as error:
        yield str(error)


def problems_of_settings(settings: list[str], *, is_supervised: bool) -> Iterator[str]:
    load, recipe = (load_supervised, SUPERVISED) if is_supervised else (load_recipe, ROLLOUT)
    try:
        load(recipe, settings)
    except RecipeError as error:
        for violation in error.violations:
            if violation.path not in (
                "model.path",
                "data.path",
                "eval.path",
            ):  # they are on no machine of tests
                yield f"{violation.path}: {violation.reason}"


@cache
def source_of(module: str) -> str | None:
    if module.partition(".")[0] in ("tests", "benchmarks", "examples"):
        place = ROOT / module.replace(".", "/")
        file = next(filter(Path.exists, (place.with_suffix(".py"), place / "__main__.py")), None)
    else:
        spec = importlib.util.find_spec(module)
        file = Path(spec.origin) if spec is not None and spec.origin else None
    return file.read_text(encoding="utf-8") if file else None


class Parser(argparse.ArgumentParser):
    """A parser that raises its complaints."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def declared_arguments(source: str) -> Parser:
    """Return a parser of the arguments that a module declares, without importing the module."""
    parser = Parser()
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument":
            options = {
                keyword.arg: ast.literal_eval(keyword.value)
                for keyword in call.keywords
                if keyword.arg in ("nargs", "action", "dest", "required")
                and isinstance(keyword.value, ast.Constant)
            }
            parser.add_argument(*map(ast.literal_eval, call.args), **options)
    return parser


def problems_of_module(module: str, arguments: tuple[str, ...], is_whole: bool) -> Iterator[str]:
    source = source_of(module)
    if source is None:
        yield f"no module {module}"
    elif module == "pytest":
        yield from problems_of_pytest(arguments)
    elif "add_argument" in source:
        try:
            declared_arguments(source).parse_args(arguments)
        except ValueError as error:
            if is_whole or "required" not in str(error):
                yield f"{module}: {error}"
    elif arguments and "sys.argv" not in source and module != "venv":
        yield f"{module} takes no arguments"


def problems_of_pytest(arguments: tuple[str, ...]) -> Iterator[str]:
    yield from (f"no tests {word}" for word in arguments if not (ROOT / word).exists())


def problems_of_make(arguments: tuple[str, ...]) -> Iterator[str]:
    for word in arguments:
        name, is_variable, _ = word.partition("=")
        if is_variable and f"$({name})" not in MAKEFILE:
            yield f"no variable {name}"
        elif not is_variable and not re.search(rf"^{re.escape(word)}:", MAKEFILE, re.M):
            yield f"no target {word}"


def problems(command: Command) -> Iterator[str]:
    words = tuple(word for word in command.words if word not in LEFT_OUT)
    if "slipstream" in words and (words[0] in ("srun", "salloc") or words[:2] == ("docker", "run")):
        words = words[len(words) - 1 - words[::-1].index("slipstream") :]
    program, arguments = words[0].rpartition("bin/")[2], words[1:]
    if program == "slipstream":
        yield from problems_of_slipstream(arguments, command.is_whole)
    elif program == "make":
        yield from problems_of_make(arguments)
    elif program == "pytest":
        yield from problems_of_pytest(arguments)
    elif program.startswith("python"):
        module = arguments.index("-m") + 1
        yield from problems_of_module(arguments[module], arguments[module + 1 :], command.is_whole)
    elif program not in PROGRAMS and not (ROOT / program).exists():
        yield f"unknown program {program}: PROGRAMS names those that no test checks"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_of_a_page_exists_with_its_arguments(page: Path):
    wrong = [f"{command}: {problem}" for command in commands(page) for problem in problems(command)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "slipstream trian my.yaml",
        "slipstream train my.yaml --resum",
        "slipstream train",
        "slipstream train qickstart",
        "slipstream train my.yaml run.stpes=500",
        "slipstream train my.yaml run.steps=many",
        "slipstream sft RECIPE.yaml rollout.batch_size=4",
        "slipstream simulate my.yaml simulate.layout.knots=2",
        "slipstream convert hf-to-megatron MODEL OUT --tensors 2",
        "slipstream settings actor.lore",
        "slipstream metrics trian",
        "srun --nodes=1 slipstream docter",
        "make tset",
        "make crash-sweep KILLS=3",
        "python -m benchmarks.nothing",
        "python -m benchmarks.control --fast",
        "python -m benchmarks.mfu --layer-count 2",
        "python -m tests.log_probs",
        ".venv/bin/pytest tests/nothing",
        "unheard-of --option",
    ],
)
def test_a_wrong_command_is_noticed(text: str):
    assert list(problems(Command("a page", tuple(text.split()), is_whole=True)))


def is_run(command: Command) -> bool:
    if command.program != "slipstream" or not command.is_whole:
        return False
    return command.words[1] not in NOT_RUN or "--print" in command.words


CONFIG = str(MODELS / "Qwen2.5-1.5B-Instruct")


def at_the_desk(command: Command) -> tuple[str, ...]:
    """Put files that exist at the desk in the place of those that only the reader has."""
    words: list[str] = []
    for word in command.words[1:]:
        if word == "RECIPE" or (re.fullmatch(r"[\w.-]+\.yaml", word) and words[-1] != "-o"):
            word = "sft-qwen3-4b-1n8g-dp8" if "--sft" in command.words else "my.yaml"
            word = "gateway.yaml" if words[0] == "key" else word
        if word.endswith("/config.json"):
            word = CONFIG
        words.append("SCRIPT.sh" if word.endswith(".sh") else word)
    if words[0] == "import" and words[1] in FILES:
        words[2] = FILES[words[1]][0]
    is_bundled = (ROOT / f"configs/recipes/{words[1]}.yaml").exists() if len(words) > 1 else False
    needs_model = is_bundled or (words[0] == "plan" and words[1].startswith("examples/"))
    return tuple([*words, "--model-config", CONFIG] if needs_model and CONFIG not in words else words)


RUN = {at_the_desk(command): command for page in PAGES for command in commands(page) if is_run(command)}


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """A folder with what the reader of a page has by then: a model, a recipe, runs, a script of slime."""
    folder = tmp_path_factory.mktemp("desk")
    model = make_checkpoint(folder / "model", vocab_size=64, max_position_embeddings=1024)
    build_tokenizer().save_pretrained(model)
    init(folder, model)
    recipe = (folder / "recipe.yaml").rename(folder / "my.yaml").read_text(encoding="utf-8")
    (folder / "gateway.yaml").write_text(f"{recipe}\ngateway: {{}}\n")
    (folder / "examples").symlink_to(ROOT / "examples")
    for name in ("my-run", "a", "b", "quickstart", "smollm2"):
        make_run(folder / "runs", name, steps=3)
    log = folder / "runs/my-run/logs/engine-1.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("ready\n")
    (folder / "SCRIPT.sh").write_text(SCRIPT)
    for name, text in FILES.values():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("words", RUN, ids=lambda words: str(RUN[words]))
def test_a_cheap_command_of_a_page_succeeds(words: tuple[str, ...], desk: Path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path if words[0] == "init" else desk)
    monkeypatch.syspath_prepend(str(desk))  # as the command line does
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output


def test_nothing_is_excused_that_no_page_names():
    every = [command for page in PAGES for command in commands(page)]
    assert {command.program for command in every} >= set(PROGRAMS)
    assert {command.words[1] for command in every if command.program == "slipstream"} >= set(NOT_RUN)
    places = re.findall(r"tests/[\w./]+", " ".join(NOT_RUN.values()))
    assert not [place for place in places if not (ROOT / place).exists()]
