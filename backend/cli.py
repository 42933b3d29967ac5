"""``slipstream``, the command line.

Exit codes: 0 done, 1 the run failed or was stopped, 2 the input was wrong.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from rich.console import Console

from slipstream.backend.commands.doctor import examine, print_findings
from slipstream.bridge.families import ModelSpec, model_spec
from slipstream.bridge.hf_config import UnsupportedModel
from slipstream.bridge.plan import ExportPlan
from slipstream.configs.load import load_recipe, load_supervised
from slipstream.configs.rules.models import MODELS
from slipstream.configs.schema import RunConfig
from slipstream.configs.violations import RecipeError

T = TypeVar("T")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous RL training of language models: Megatron trains, SGLang generates, nobody waits.",
)
convert = typer.Typer(
    no_args_is_help=True,
    help="Checkpoints from Hugging Face's format into Megatron's and back, at any layout.",
)
app.add_typer(convert, name="convert")
_errors = Console(stderr=True, soft_wrap=True, highlight=False)

FAILED, WRONG_INPUT = 1, 2

Recipe = Annotated[str, typer.Argument(help="A recipe file, or the name of one that comes with Slipstream.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the recipe's.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run of this name where its last process ended.")
]
Out = Annotated[Path, typer.Argument(help="The folder to be made.")]
Tensor = Annotated[int, typer.Option(help="Tensor-parallel ranks.")]
Pipeline = Annotated[int, typer.Option(help="Pipeline stages.")]
VirtualPipeline = Annotated[int, typer.Option(help="Parts of the model on each pipeline stage.")]
Expert = Annotated[int, typer.Option(help="Ranks that different experts are spread over.")]
ExpertTensor = Annotated[
    int | None, typer.Option(help="Tensor-parallel ranks of each expert; default: as --tensor.")
]
Layers = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Layers of each part of the pipeline; default: the same in each."),
]


@app.command()
def train(recipe: Recipe, overrides: Overrides = None, resume: Resume = False) -> None:
    """Run a recipe from its first step to its last."""
    config = _load(recipe, overrides)
    from slipstream.backend.driver.run import run
    from slipstream.backend.monitor.summary import print_summary

    summary = _attended(config, partial(run, config, resume=resume), _lies_in(config))
    print_summary(summary, sys.stdout, name=config.run.name)


@app.command()
def sft(recipe: Recipe, overrides: Overrides = None, resume: Resume = False) -> None:
    """Train a policy on responses, or a reward model on preferences; writes a Hugging Face checkpoint."""
    asked = _load(recipe, overrides, load_supervised)
    from slipstream.backend.driver.sft import run_supervised

    start = partial(run_supervised, asked, resume=resume)
    typer.echo(_attended(asked.run, start, _lies_in(asked.run)))


@app.command()
def check(recipe: Recipe, overrides: Overrides = None) -> None:
    """Say everything that is wrong with a recipe and its model, or that nothing is."""
    config = _load(recipe, overrides)
    if (config.model.path / "config.json").exists():  # else `prepare` makes it
        from slipstream.backend.driver.inputs import checkpoint_problems

        _plan(config)
        if problems := checkpoint_problems(config, MODELS):
            _errors.print("\n".join(problems), markup=False)
            raise typer.Exit(WRONG_INPUT)
    typer.echo(f"{recipe}: nothing wrong ({config.run.name}, {config.run.steps} steps)")


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Also in which order and from which ranks the weights leave.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts: one JSON document.")] = False,
) -> None:
    """Show how a recipe lays out the model on the trainer's ranks. Needs its config.json, no weights."""
    from slipstream.backend.commands import plan as planning

    config = _load(recipe, overrides)
    _, found = _plan(config)
    if as_json:
        typer.echo(planning.as_json(config, found))
    else:
        planning.print_plan(config, found, Console(soft_wrap=True, highlight=False), weights=weights)


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="The folder of a run that is not running now.")],
    as_json: Annotated[bool, typer.Option("--json", help="For scripts: one JSON document.")] = False,
) -> None:
    """Recount a run from its ledger and checkpoints: nothing lost, nothing trained twice."""
    from slipstream.backend.commands.audit import as_json as json_of
    from slipstream.backend.commands.audit import audit_run, print_audit
    from slipstream.rollout.ledger.database import LedgerError

    try:
        found = audit_run(run)
    except LedgerError as error:
        _errors.print(str(error), markup=False)
        raise typer.Exit(WRONG_INPUT) from None
    if as_json:
        typer.echo(json_of(found))
    else:
        print_audit(found, Console(soft_wrap=True))
    if found.discrepancies:
        raise typer.Exit(FAILED)


@app.command()
def simulate(
    recipe: Recipe,
    overrides: Overrides = None,
    lengths: Annotated[
        Path | None, typer.Option(help="Response lengths: a number a line, a JSON list, or JSON lines.")
    ] = None,
    nodes: Annotated[
        list[str] | None, typer.Option(metavar="N ...", help="Sizes of the cluster, such as --nodes 1 2 4.")
    ] = None,
    fit: Annotated[
        Path | None, typer.Option(help="Folder of a run: its cost model and lengths are used.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of all random numbers; default: run.seed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts: one JSON document.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for simulation.json and the timeline as a picture.")
    ] = None,
) -> None:
    """Run a recipe in virtual time: how fast it would be, and how other schedules would do."""
    from slipstream.backend.simulate.command import Failed, Options, run

    try:
        run(Options(recipe, tuple(overrides or ()), lengths, tuple(nodes or ()), fit, seed, as_json, out))
    except RecipeError as error:
        _errors.print(str(error), markup=False)
        raise typer.Exit(WRONG_INPUT) from None
    except Failed as error:
        _errors.print(f"failed: {error}", markup=False)
        raise typer.Exit(FAILED) from None


@convert.command()
def hf_to_megatron(
    model: Annotated[Path, typer.Argument(help="An HF checkpoint directory.")],
    out: Out,
    tensor: Tensor = 1,
    pipeline: Pipeline = 1,
    virtual_pipeline: VirtualPipeline = 1,
    expert: Expert = 1,
    expert_tensor: ExpertTensor = None,
    layers: Layers = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None, typer.Option(help="Of the weights; default: as in MODEL.")
    ] = None,
) -> None:
    """Write the weights of MODEL as a Megatron checkpoint, which any layout can load."""
    from slipstream.backend.commands import convert

    options = convert.LayoutOptions(tensor, pipeline, virtual_pipeline, expert, expert_tensor, layers)
    _convert(out, lambda: convert.hf_to_megatron(model, out, options, dtype))


@convert.command()
def megatron_to_hf(
    checkpoint: Annotated[
        Path, typer.Argument(help="A Megatron checkpoint, or the folder of a run's checkpoints: its newest.")
    ],
    out: Out,
    model: Annotated[
        Path, typer.Option(help="HF checkpoint directory of the model: config and tokenizer; no weights.")
    ],
    tensor: Tensor = 1,
    pipeline: Pipeline = 1,
    virtual_pipeline: VirtualPipeline = 1,
    expert: Expert = 1,
    expert_tensor: ExpertTensor = None,
    layers: Layers = None,
) -> None:
    """Write the weights of CHECKPOINT as an HF checkpoint directory."""
    from slipstream.backend.commands import convert

    options = convert.LayoutOptions(tensor, pipeline, virtual_pipeline, expert, expert_tensor, layers)
    _convert(out, lambda: convert.megatron_to_hf(checkpoint, out, model, options))


@app.command()
def doctor() -> None:
    """Look at this machine and say what Slipstream finds on it."""
    findings = examine()
    print_findings(findings)
    if any(finding.wrong for finding in findings):
        raise typer.Exit(FAILED)


def _convert(out: Path, work: Callable[[], str]) -> None:
    from slipstream.backend.cluster.local_ranks import RankFailed
    from slipstream.backend.commands.convert import WrongInput

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing that was started stays
    try:
        typer.echo(work())
    except WrongInput as error:
        _errors.print(str(error), markup=False)
        raise typer.Exit(WRONG_INPUT) from None
    except (RankFailed, OSError) as error:
        for note in getattr(error, "__notes__", ()):
            _errors.print(note, markup=False)
        _errors.print(f"failed: {error}; there is no {out}", markup=False)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        _errors.print(f"stopped; there is no {out}", markup=False)
        raise typer.Exit(FAILED) from None


def _load(recipe: str, overrides: list[str] | None, load: Callable[..., T] = load_recipe) -> T:
    try:
        return load(Path(recipe), overrides or [])
    except RecipeError as error:
        _errors.print(str(error), markup=False)
        raise typer.Exit(WRONG_INPUT) from None


def _attended(config: RunConfig, start: Callable[..., Coroutine[Any, Any, T]], stopped: str) -> T:
    """What ``start(progress)`` comes to; its progress, and how it ends otherwise, are told to the user.

    stopped: what is there when it was asked to end.
    """
    import uvloop

    from slipstream.backend.cluster.placement import PlacementError
    from slipstream.backend.driver.inputs import InputError
    from slipstream.backend.driver.stop import Stopped
    from slipstream.backend.monitor.progress import open_progress

    progress = open_progress(config.run.steps)
    try:
        with closing(progress), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(start(progress))
    except Stopped:
        _errors.print(f"stopped; {stopped}")
        raise typer.Exit(FAILED) from None
    except (InputError, PlacementError) as error:
        _errors.print(str(error), markup=False)
        raise typer.Exit(WRONG_INPUT) from None
    except Exception as error:
        for cause in _leaves(error):
            _errors.print(f"[red]failed[/]: {type(cause).__name__}: ", end="")
            _errors.print(str(cause), markup=False)
        if config.run.folder.exists():
            _errors.print(f"logs: {config.run.folder / 'logs'}", markup=False)
        raise typer.Exit(FAILED) from error


def _lies_in(config: RunConfig) -> str:
    return f"what there is lies in {config.run.folder}, and --resume goes on with it"


def _plan(config: RunConfig) -> tuple[ModelSpec, ExportPlan]:
    """The model that a recipe names, and how it is laid out."""
    from slipstream.backend.megatron.export_plan import export_plan
    from slipstream.bridge.layout import UnevenSplit

    try:
        spec = model_spec(config.model.path)
        return spec, export_plan(config, spec)
    except UnsupportedModel as error:
        _errors.print(f"model.path: {error}", markup=False)
    except UnevenSplit as error:
        _errors.print(f"actor.parallel: {error}", markup=False)
    raise typer.Exit(WRONG_INPUT)


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors themselves, out of the groups that parallel tasks raise."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def main() -> None:
    """The console script. The user's own workflows and rewards are importable from where it is called."""
    sys.path.insert(0, os.getcwd())
    app()


if __name__ == "__main__":
    main()
