"""``slipstream simulate``: from the command line's words to tables, JSON and a picture."""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from slipstream.backend.simulate.clock import Deadlock
from slipstream.backend.simulate.compare import Work, compare
from slipstream.backend.simulate.fit import Fitted, fit
from slipstream.backend.simulate.gpu_split import layout_violations, model_of
from slipstream.backend.simulate.picture import draw
from slipstream.backend.simulate.report import Report, as_json, print_report
from slipstream.backend.simulate.trace import read_trace
from slipstream.backend.simulate.world import SimulationStalled
from slipstream.configs.load import load_recipe
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.simulate import ClusterLayout
from slipstream.configs.violations import RecipeError, Violation
from slipstream.rollout.prompts import PromptError, read_prompts

LENGTH_FIELDS = ("length", "response_length", "tokens", "new_tokens")
"""Under one of these names a line of JSON holds a length."""

NODES = re.compile(r"[0-9,]+")

SHOWN = 5
"""Wrong lines of one file that are named."""

WIDTH = 132
"""Columns of the tables where there is no terminal."""

JSON_FILE, PICTURE = "simulation.json", "timeline.png"


class SimulationFailed(RuntimeError):
    """The simulated run does not get through: where who waits for what."""


@dataclass(frozen=True)
class Options:
    """As they were typed."""

    recipe: str
    overrides: Sequence[str] = ()
    """The words after the recipe. Numbers among them belong to ``--nodes``, which takes but one by itself."""
    lengths: Path | None = None
    nodes: Sequence[str] = ()
    fit: Path | None = None
    seed: int | None = None
    as_json: bool = False
    out: Path | None = None


def run(options: Options) -> None:
    """Tables or JSON on standard output, files in ``options.out``.

    Raises RecipeError with everything that is wrong with the input, and SimulationFailed.
    """
    works, fitted = read(options)
    errors = Console(stderr=True, highlight=False)
    try:
        with errors.status("simulating") as status:
            comparisons = tuple(compare(work, lambda text: status.update(Text(text))) for work in works)
    except (SimulationStalled, Deadlock) as error:
        raise SimulationFailed(str(error)) from None
    report = Report(works[0], fitted, comparisons)
    if options.out is not None:
        _write(report, options.out)
    if options.as_json:
        print(as_json(report), end="")
        return
    console = Console(highlight=False)
    print_report(report, console if console.is_terminal else Console(highlight=False, width=WIDTH))


# ---- input


def read(options: Options) -> tuple[list[Work], Fitted | None]:
    """What is to be simulated, one work for each size of the cluster. Raises RecipeError."""
    wrong: list[Violation] = []

    def tried(read: Callable[..., Any], *args: Any) -> Any:
        try:
            return read(*args)
        except RecipeError as error:
            wrong.extend(error.violations)
            return None

    numbers = [word for word in options.overrides if options.nodes and NODES.fullmatch(word)]
    overrides = [word for word in options.overrides if word not in numbers]
    config = tried(recipe, options.recipe, overrides)
    lengths = tried(read_lengths, options.lengths) if options.lengths else None
    fitted = tried(fit_run, options.fit) if options.fit else None
    nodes = tried(read_nodes, [*options.nodes, *numbers])
    if options.lengths and options.fit:
        wrong.append(
            Violation(
                "--lengths", str(options.lengths), "--fit takes the lengths of its run; give one of both"
            )
        )
    if options.out is not None:
        wrong += _out_violations(options.out)
    if config is not None:
        if fitted is not None:
            kept = model_of(config)
            model = fitted.model.model_copy(update={"layout": kept.layout, "compare": kept.compare})
            config, lengths = config.model_copy(update={"simulate": model}), fitted.lengths
        configs = [config]
        if nodes and not isinstance(model_of(config).layout, ClusterLayout):
            reason = "only a cluster has nodes: set simulate.layout.type to cluster"
            wrong.append(Violation("--nodes", " ".join(map(str, nodes)), reason))
        elif nodes:
            configs = [_with_nodes(config, number) for number in nodes]
        seed = config.run.seed if options.seed is None else options.seed
        held_out = tried(_held_out, config) or 0
        works = [Work(one, seed, lengths, held_out) for one in configs]
        for work in works:
            wrong += layout_violations(work.config)
            wrong += _memory_violations(work)
    if wrong:
        raise RecipeError(dict.fromkeys(wrong), f"the input of simulate {options.recipe}")
    return works, fitted


def recipe(path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """As for training, but model and prompts need not be there: no token of them is looked at."""
    return load_recipe(Path(path), [*overrides, "prepare=slipstream.backend.simulate.only_simulated"])


def read_nodes(words: Sequence[str]) -> list[int]:
    """``1 2 4`` and ``1,2,4``."""
    numbers = [number for word in words for number in word.split(",")]
    wrong = [word for word in numbers if not (word.isascii() and word.isdigit() and int(word))]
    if wrong:
        raise RecipeError(
            [Violation("--nodes", word, "expected a whole number of at least 1") for word in wrong]
        )
    return [int(word) for word in numbers]


def read_lengths(path: Path) -> np.ndarray:
    """Response lengths of a file: a whole number a line, a JSON list of them, or JSON lines with a field."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise RecipeError([Violation("--lengths", str(path), f"cannot be read: {reason}")]) from None
    if text.lstrip().startswith("["):
        try:
            entries = list(enumerate(json.loads(text), start=1))
        except ValueError as error:
            raise RecipeError([Violation("--lengths", str(path), f"not a JSON list: {error}")]) from None
        unit = "entry"
    else:
        entries = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
        unit = "line"
    lengths, wrong = [], []
    for number, entry in entries:
        length = _length(entry)
        if length is None:
            wrong.append((number, entry))
        else:
            lengths.append(length)
    expected = f"expected a whole number of at least 1, or an object with one as {', '.join(LENGTH_FIELDS)}"
    found = [
        Violation(f"--lengths {path}, {unit} {number}", entry, expected) for number, entry in wrong[:SHOWN]
    ]
    if len(wrong) > SHOWN:
        found.append(Violation(f"--lengths {path}", f"{len(wrong) - SHOWN} more", "wrong as well"))
    if not entries:
        found.append(Violation("--lengths", str(path), "holds no lengths"))
    if found:
        raise RecipeError(found)
    return np.array(lengths, np.int64)


def _length(entry: Any) -> int | None:
    try:
        found = json.loads(entry) if isinstance(entry, str) else entry
    except ValueError:
        return None
    if isinstance(found, dict):
        found = next((found[name] for name in LENGTH_FIELDS if name in found), None)
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 1 else None


def fit_run(run: Path) -> Fitted:
    """The cost model of a run, from its folder."""
    return fit(recipe(str(run / "recipe.yaml")), read_trace(run))


def _with_nodes(config: RunConfig, nodes: int) -> RunConfig:
    model = model_of(config)
    layout = model.layout.model_copy(update={"nodes": nodes})
    return config.model_copy(update={"simulate": model.model_copy(update={"layout": layout})})


def _held_out(config: RunConfig) -> int:
    """Prompts of each evaluation during the run, as far as that is known without the prompts."""
    if config.eval is None or not config.eval.every:
        return 0
    if not config.eval.path.exists():
        return config.eval.max_prompts or 0
    try:
        prompts = len(read_prompts(config.eval.path))
    except (PromptError, OSError) as error:
        raise RecipeError([Violation("eval.path", str(config.eval.path), str(error))]) from None
    return min(prompts, config.eval.max_prompts or prompts)


def _memory_violations(work: Work) -> list[Violation]:
    engine, longest = model_of(work.config).engine, work.workload().longest_request()
    if engine.kv_tokens is None or longest <= engine.kv_tokens:
        return []
    reason = f"the longest request, prompt included, comes to {longest} tokens and would never fit"
    return [Violation("simulate.engine.kv_tokens", engine.kv_tokens, reason)]


def _out_violations(out: Path) -> list[Violation]:
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        return [Violation("--out", str(out), f"{there} is not a directory")]
    if not os.access(there, os.W_OK):
        return [Violation("--out", str(out), f"{there} cannot be written to")]
    return []


# ---- output


def _write(report: Report, folder: Path) -> None:
    """One JSON file, and a picture for each size of the cluster."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON_FILE).write_text(as_json(report), encoding="utf-8")
    config, rollout = report.work.config, report.work.config.rollout
    several = len(report.comparisons) > 1
    for one in report.comparisons:
        title = f"{config.run.name} on {one.layout}"
        subtitle = (
            f"simulated: eta {rollout.max_head_offpolicyness}, {rollout.consumption.type}, "
            f"{config.weights.interrupt}; {one.own.tokens_per_s:,.0f} trained tokens/s, "
            f"trainer idle {one.own.trainer_idle:.0%}, engines idle {one.own.engine_idle:.0%}"
        )
        name = f"timeline-{one.layout.gpus}-gpus.png" if several else PICTURE
        (folder / name).write_bytes(
            draw(one.timeline, title, subtitle, _most_running(report, one.layout.engines))
        )


def _most_running(report: Report, engines: int) -> int:
    """Requests of an engine that is drawn as full."""
    most = -(-report.work.config.rollout.max_concurrent // engines)
    return min(model_of(report.work.config).engine.max_running, most)
