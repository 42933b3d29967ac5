"""Reads the input of ``slipstream simulate``, and reports every problem of it at once."""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from slipstream.backend.driver.start.run_length import in_steps
from slipstream.backend.simulate.compare import Costs, Work
from slipstream.backend.simulate.fit import Fitted, fit
from slipstream.backend.simulate.gpu_split import layout_of, layout_violations, model_of
from slipstream.backend.simulate.trace import read_trace
from slipstream.configs.load import load_recipe
from slipstream.configs.rules.inputs import NO_INPUTS
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.simulate import ClusterLayout
from slipstream.configs.violations import RecipeError, Violation
from slipstream.rollout.prompts import PromptError, checked_prompts

A = TypeVar("A")
T = TypeVar("T")

LENGTH_FIELDS = ("length", "response_length", "tokens", "new_tokens")
"""Names under which a JSON object may hold a response length."""

NODES = re.compile(r"[0-9,]+")

SHOWN = 5
"""Number of wrong lines of a file that are reported one by one."""


@dataclass(frozen=True)
class Options:
    """The command line as it was typed."""

    recipe: str
    overrides: Sequence[str] = ()
    """Words after the recipe. With ``--nodes``, whose parser takes a single word, its other numbers too."""
    lengths: Path | None = None
    nodes: Sequence[str] = ()
    fit: Path | None = None
    seed: int | None = None
    as_json: bool = False
    out: Path | None = None


Derive = Callable[[RunConfig], Costs | None]
"""Returns the costs of a recipe's own model by the split of the GPUs, if the model is known."""


def read(options: Options, derive: Derive) -> tuple[list[Work], Fitted | None]:
    """Return one work for each size of the cluster, and the fit. Raises RecipeError with every problem.

    A fitted cost model is not derived.
    """
    problems: list[Violation] = []

    def attempt(reader: Callable[[A], T], argument: A) -> T | None:
        try:
            return reader(argument)
        except RecipeError as error:
            problems.extend(error.violations)
            return None

    numbers = [word for word in options.overrides if options.nodes and NODES.fullmatch(word)]
    overrides = [word for word in options.overrides if word not in numbers]
    config = attempt(lambda path: recipe(path, overrides), options.recipe)
    lengths = attempt(read_lengths, options.lengths) if options.lengths else None
    fitted = (
        attempt(lambda run: fit(recipe(str(run / "recipe.yaml")), read_trace(run)), options.fit)
        if options.fit
        else None
    )
    nodes = attempt(read_nodes, [*options.nodes, *numbers]) or []
    if options.lengths and options.fit:
        reason = "--fit takes the lengths of its run; give one of both"
        problems.append(Violation("--lengths", str(options.lengths), reason))
    problems += _out_violations(options.out)
    works: list[Work] = []
    if config is not None:
        if fitted is not None:
            settings = model_of(config)
            model = fitted.model.model_copy(update={"layout": settings.layout, "compare": settings.compare})
            config, lengths = config.model_copy(update={"simulate": model}), fitted.lengths
        seed = config.run.seed if options.seed is None else options.seed
        held_out = attempt(_held_out, config) or 0
        sizes = attempt(lambda nodes: _sizes(config, nodes), nodes) or [config]
        unplaced = [violation for sized in sizes for violation in layout_violations(sized)]
        problems += unplaced
        for sized in sizes:
            costs = derive(sized) if fitted is None and not unplaced else None
            own = sized if costs is None else costs(layout_of(sized))
            works.append(Work(own, seed, lengths, held_out, costs))
        for work in works:
            problems += _memory_violations(work)
    if problems:
        raise RecipeError(dict.fromkeys(problems), f"the input of simulate {options.recipe}")
    return works, fitted


def recipe(path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a recipe as for training, except that model and prompts may be missing: no token is looked at.

    ``run.epochs`` are turned into steps. Raises RecipeError, also where that needs the missing.
    """
    config = load_recipe(Path(path), [*overrides, f"prepare={NO_INPUTS}"])
    return config if config.run.epochs is None else in_steps(config, _counted_prompts(config))


def _counted_prompts(config: RunConfig) -> int:
    """Return the number of prompts to train on. Raises RecipeError if it is not known without the model."""
    epochs = config.run.epochs
    if config.data is not None and config.data.max_prompt_tokens is not None:
        reason = "data.max_prompt_tokens leaves prompts out, of which no token is looked at here"
        raise RecipeError([Violation("run.epochs", epochs, f"{reason}; set run.steps=N run.epochs=null")])
    try:
        return sum(1 for file in config.training_files for _ in checked_prompts(file))
    except (PromptError, OSError) as error:
        reason = f"the prompts cannot be counted: {error}; set run.steps=N run.epochs=null"
        raise RecipeError([Violation("run.epochs", epochs, reason)]) from None


def read_nodes(words: Sequence[str]) -> list[int]:
    """Parse ``1 2 4`` or ``1,2,4``."""
    numbers = [number for word in words for number in word.split(",")]
    wrong = [word for word in numbers if not (word.isascii() and word.isdigit() and int(word))]
    if wrong:
        raise RecipeError(
            Violation("--nodes", word, "expected a whole number of at least 1") for word in wrong
        )
    return [int(word) for word in numbers]


def read_lengths(path: Path) -> np.ndarray:
    """Read response lengths: a whole number per line, a JSON list, or JSON lines with a length field."""
    try:
        text = path.read_text(encoding="utf-8")
        is_list = text.lstrip().startswith("[")
        entries = json.loads(text) if is_list else text.splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = f"cannot be read: {getattr(error, 'strerror', None) or 'not a text file'}"
        raise RecipeError([Violation("--lengths", str(path), reason)]) from None
    except ValueError as error:
        raise RecipeError([Violation("--lengths", str(path), f"not a JSON list: {error}")]) from None
    numbered = [(number, entry) for number, entry in enumerate(entries, start=1) if is_list or entry.strip()]
    lengths = [_length(entry) for _, entry in numbered]
    wrong = [place for place, length in zip(numbered, lengths, strict=True) if length is None]
    expected = f"expected a whole number of at least 1, or an object with one as {', '.join(LENGTH_FIELDS)}"
    unit = "entry" if is_list else "line"
    problems = [
        Violation(f"--lengths {path}, {unit} {number}", entry, expected) for number, entry in wrong[:SHOWN]
    ]
    if len(wrong) > SHOWN:
        problems.append(Violation(f"--lengths {path}", f"{len(wrong) - SHOWN} more", "wrong as well"))
    if not lengths:
        problems.append(Violation("--lengths", str(path), "holds no lengths"))
    if problems:
        raise RecipeError(problems)
    return np.array(lengths, np.int64)


def _length(entry: object) -> int | None:
    try:
        length = json.loads(entry) if isinstance(entry, str) else entry
    except ValueError:
        return None
    if isinstance(length, dict):
        length = next((length[name] for name in LENGTH_FIELDS if name in length), None)
    return length if isinstance(length, int) and not isinstance(length, bool) and length >= 1 else None


def _sizes(config: RunConfig, nodes: Sequence[int]) -> list[RunConfig]:
    """Return the recipe for each number of nodes. Raises RecipeError for a layout without nodes."""
    model = model_of(config)
    if nodes and not isinstance(model.layout, ClusterLayout):
        reason = "only a cluster has nodes: set simulate.layout.type to cluster"
        raise RecipeError([Violation("--nodes", " ".join(map(str, nodes)), reason)])
    layouts = [model.layout.model_copy(update={"nodes": number}) for number in nodes]
    models = [model.model_copy(update={"layout": layout}) for layout in layouts]
    return [config.model_copy(update={"simulate": model}) for model in models]


def _held_out(config: RunConfig) -> int:
    """Return the number of prompts of each evaluation during the run, as far as it is known."""
    if config.eval is None or not config.eval.every:
        return 0
    prompts, most = 0, config.eval.max_prompts
    for file in config.held_out_files:
        if not file.path.exists():
            prompts += most or 0
            continue
        try:
            prompts += sum(1 for _ in islice(checked_prompts(file), most))
        except (PromptError, OSError) as error:
            raise RecipeError([Violation(file.setting, str(file.path), str(error))]) from None
    return prompts


def _memory_violations(work: Work) -> Iterator[Violation]:
    kv_tokens, longest = model_of(work.config).engine.kv_tokens, work.workload().longest_request()
    if kv_tokens is not None and longest > kv_tokens:
        reason = f"the longest request, prompt included, comes to {longest} tokens and would never fit"
        yield Violation("simulate.engine.kv_tokens", kv_tokens, reason)


def _out_violations(out: Path | None) -> Iterator[Violation]:
    if out is not None:
        folder = next(path for path in (out, *out.absolute().parents) if path.exists())
        if not folder.is_dir():
            yield Violation("--out", str(out), f"{folder} is not a directory")
        elif not os.access(folder, os.W_OK):
            yield Violation("--out", str(out), f"{folder} cannot be written to")
