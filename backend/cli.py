"""``slipstream``, the command line: names and options of its commands.

Exit codes: 0 done, 1 the work failed or was stopped, 2 the input was wrong.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer
from rich.console import Console

from slipstream.backend.commands.outcome import CommandError, Failed, WrongInput
from slipstream.backend.commands.settings import command_with_settings
from slipstream.configs.load import load_recipe, load_supervised
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.supervised import SupervisedConfig
from slipstream.configs.violations import RecipeError

T = TypeVar("T")

RUN, LOOK, TOOLS = "Run", "Look before and after", "Tools"
"""Groups of commands in the help."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous RL training of language models: Megatron trains, SGLang generates, nobody waits.",
)
convert = typer.Typer(
    no_args_is_help=True,
    help="Convert checkpoints from Hugging Face's format into Megatron's and back, at any layout.",
)
keys = typer.Typer(no_args_is_help=True, help="API keys of the users whom a gateway serves.")
app.add_typer(convert, name="convert", rich_help_panel=TOOLS)
app.add_typer(keys, name="key", rich_help_panel=TOOLS)
_errors = Console(stderr=True, soft_wrap=True, highlight=False)

Recipe = Annotated[str, typer.Argument(help="A recipe file, or the name of one that comes with Slipstream.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the recipe's.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run of this name where its last process ended.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Delete the earlier run of this name, and start anew.")
]
DebugRolloutOnly = Annotated[
    bool,
    typer.Option(
        "--debug-rollout-only",
        help="Generate, judge and save each batch, without a trainer: in the run folder NAME-rollout-only.",
    ),
]
DebugTrainOnly = Annotated[
    Path | None,
    typer.Option(
        "--debug-train-only",
        metavar="FOLDER",
        help="Train on the batches that --debug-rollout-only has saved, without engines: in the run folder "
        "NAME-train-only.",
    ),
]
AcceptChangedInputs = Annotated[
    bool,
    typer.Option(
        "--accept-changed-inputs",
        help="With --resume: go on although the content of a data set or of the model has changed.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, for scripts.")]
ModelConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="The model's config.json, or its folder, where neither the model nor the prompts are.",
    ),
]
KeysOf = Annotated[
    str, typer.Argument(metavar="RECIPE", help="The gateway's recipe, or its file of API keys (.json).")
]
KeyName = Annotated[str, typer.Argument(help="Name of the key's holder, under which turns are stored.")]
Sft = Annotated[bool, typer.Option("--sft", help="The recipe is one of `slipstream sft`.")]
Out = Annotated[Path, typer.Argument(help="The folder to make.")]
Tensor = Annotated[int, typer.Option(help="Tensor-parallel ranks.")]
Pipeline = Annotated[int, typer.Option(help="Pipeline stages.")]
VirtualPipeline = Annotated[int, typer.Option(help="Parts of the model on each pipeline stage.")]
Expert = Annotated[int, typer.Option(help="Ranks over which different experts are spread.")]
ExpertTensor = Annotated[
    int | None, typer.Option(help="Tensor-parallel ranks of each expert; default: the value of --tensor.")
]
Family = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TYPE=PATH",
        help="A model family of yours, as in `model.families` of a recipe: the `model_type` of a config.json "
        "and the import path of its module. Can be given several times.",
    ),
]
Layers = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Layers of each part of the pipeline; default: equally many."),
]


def _show_version(show: bool) -> None:
    if show:
        typer.echo(f"slipstream {version('slipstream')}")
        raise typer.Exit


@app.callback()
def slipstream(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Asynchronous RL training of language models: Megatron trains, SGLang generates, nobody waits."""


def _check_options(resume: bool, accept_changed_inputs: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise WrongInput("--resume goes on with a run that --overwrite deletes: expected one of them")
    if accept_changed_inputs and not resume:
        raise WrongInput(
            "--accept-changed-inputs has no meaning without --resume: a new run takes what it gets"
        )


def _check_halves(resume: bool, debug_rollout_only: bool, debug_train_only: Path | None) -> None:
    if debug_rollout_only and debug_train_only is not None:
        raise WrongInput(
            "--debug-rollout-only has no trainer and --debug-train-only no engines: expected one"
        )
    if resume and (debug_rollout_only or debug_train_only is not None):
        raise WrongInput(
            "--resume goes on with a whole run: a half begins anew, with --overwrite in its place"
        )


@app.command(rich_help_panel=RUN, cls=command_with_settings(RunConfig))
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = False,
    accept_changed_inputs: AcceptChangedInputs = False,
    overwrite: Overwrite = False,
    debug_rollout_only: DebugRolloutOnly = False,
    debug_train_only: DebugTrainOnly = None,
) -> None:
    """Run a recipe from its first step to its last."""
    with _reported():
        _check_options(resume, accept_changed_inputs, overwrite)
        _check_halves(resume, debug_rollout_only, debug_train_only)
        config = load_recipe(Path(recipe), overrides or [])
        if debug_train_only is not None:
            from slipstream.backend.commands.halves import train_only

            typer.echo(train_only(config, debug_train_only, overwrite=overwrite))
            return
        if debug_rollout_only:
            from slipstream.backend.commands.halves import rollout_only

            typer.echo(rollout_only(config, overwrite=overwrite))
            return
        from slipstream.backend.commands.run import train
        from slipstream.backend.commands.serve import check_has_prompts
        from slipstream.backend.monitor.summary import print_summary

        check_has_prompts(config)
        summary = train(
            config, resume=resume, accept_changed_inputs=accept_changed_inputs, overwrite=overwrite
        )
        print_summary(summary, sys.stdout, name=config.run.name)


@app.command(rich_help_panel=RUN)
def serve(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = False,
    accept_changed_inputs: AcceptChangedInputs = False,
    overwrite: Overwrite = False,
) -> None:
    """Serve a recipe's policy to users, without its prompts, and learn from them if it has a section live.

    HOST, PORT, SERVED_MODEL_NAME and PRM_M in the environment replace the recipe's.
    """
    with _reported():
        _check_options(resume, accept_changed_inputs, overwrite)
        from slipstream.backend.commands import serve as serving

        config = serving.load_serving(Path(recipe), overrides or [], os.environ)
        summary = serving.serve(
            config, resume=resume, accept_changed_inputs=accept_changed_inputs, overwrite=overwrite
        )
        if summary is not None:
            from slipstream.backend.monitor.summary import print_summary

            print_summary(summary, sys.stdout, name=config.run.name)


@app.command(rich_help_panel=RUN, cls=command_with_settings(SupervisedConfig))
def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = False,
    accept_changed_inputs: AcceptChangedInputs = False,
    overwrite: Overwrite = False,
) -> None:
    """Train a policy on responses, or a reward model on preferences, and write a Hugging Face checkpoint."""
    with _reported():
        _check_options(resume, accept_changed_inputs, overwrite)
        supervised = load_supervised(Path(recipe), overrides or [])
        from slipstream.backend.commands.run import sft

        typer.echo(
            sft(supervised, resume=resume, accept_changed_inputs=accept_changed_inputs, overwrite=overwrite)
        )


@app.command(rich_help_panel=TOOLS)
def forget(
    run: Annotated[Path, typer.Argument(help="The folder of a run that serves users, or has served them.")],
    session: Annotated[str | None, typer.Option(help="Name of the session to forget.")] = None,
    key: Annotated[
        str | None, typer.Option(help="Name of the API key whose sessions, or whose session, to forget.")
    ] = None,
) -> None:
    """Remove what users have said from a run, which never trains on it again."""
    with _reported():
        from slipstream.backend.commands import forget as forgetting

        for line in forgetting.forget(run, session, key):
            typer.echo(line)


@app.command(rich_help_panel=LOOK)
def init(
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Your model, a Hugging Face checkpoint; default: the run makes one."
        ),
    ] = None,
) -> None:
    """Make a folder with a recipe, a reward and data, which runs as it is."""
    with _reported():
        from slipstream.backend.commands.init import init

        for path in init(folder, model):
            typer.echo(f"wrote {path}")
        typer.echo(
            f"\nnext:  cd {folder}\n       slipstream try recipe.yaml\n       slipstream train recipe.yaml"
        )


@app.command("try", rich_help_panel=LOOK)
def try_(
    recipe: Recipe,
    overrides: Overrides = None,
    number: Annotated[int, typer.Option("--number", "-n", min=1, max=64, help="Number of episodes.")] = 4,
    as_json: Json = False,
) -> None:
    """Run a few real episodes of a recipe on one engine: texts, rewards, errors. Trains nothing."""
    with _reported():
        config = load_recipe(Path(recipe), overrides or [])
        from slipstream.backend.commands.tryout import try_recipe

        try_recipe(config, number, as_json=as_json)


@app.command("eval", rich_help_panel=LOOK)
def eval_(
    checkpoint: Annotated[
        Path, typer.Argument(help="A Hugging Face checkpoint, such as a run's checkpoint-hf.")
    ],
    recipe: Recipe,
    overrides: Overrides = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=FILE", help="A set of prompts; default: the recipe's eval.path."),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-k", min=1, help="Completions of each prompt.")] = 1,
    temperature: Annotated[
        float, typer.Option(min=0, help="Temperature of the samples; 0: the likeliest tokens.")
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint with the recipe's workflow and reward: the mean over samples, and pass@k."""
    with _reported():
        from slipstream.backend.commands.evaluate import evaluate, prompt_sets

        config = load_recipe(Path(recipe), [*(overrides or []), f"model.path={json.dumps(str(checkpoint))}"])
        evaluate(config, prompt_sets(config, sets or []), samples, temperature, as_json=as_json)


@app.command(rich_help_panel=LOOK)
def check(
    recipe: Recipe, overrides: Overrides = None, model_config: ModelConfig = None, sft: Sft = False
) -> None:
    """Print everything that is wrong with a recipe and its models, or that nothing is."""
    with _reported():
        from slipstream.backend.commands.check import check, read_recipe, read_supervised

        supervised = read_supervised(recipe, overrides or [], model_config=model_config) if sft else None
        config = (
            supervised.run if supervised else read_recipe(recipe, overrides or [], model_config=model_config)
        )
        for note in check(config, weights=model_config is None, supervised=supervised):
            typer.echo(note)
        typer.echo(f"{recipe}: nothing wrong ({config.run.name}, {config.run.steps} steps)")


@app.command(rich_help_panel=LOOK)
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Show also in which order and from which ranks weights leave.")
    ] = False,
    split: Annotated[
        bool, typer.Option(help="Simulate the recipe's split of the GPUs and the ones next to it.")
    ] = True,
    model_config: ModelConfig = None,
    sft: Sft = False,
    as_json: Json = False,
) -> None:
    """Show layout, memory and split of the GPUs of a recipe. Needs the model's config.json, no weights."""
    with _reported():
        from slipstream.backend.commands import plan as planning
        from slipstream.backend.commands.check import planned, read_recipe
        from slipstream.backend.monitor.tables import table_console
        from slipstream.backend.simulate.advice import advise

        config = read_recipe(recipe, overrides or [], model_config=model_config, supervised=sft)
        plan = planned(config, supervised=sft)
        advice = advise(config, plan.export.spec.geometry, plan.engine) if split and plan.engine else None
        if as_json:
            typer.echo(planning.as_json(plan, advice))
        else:
            planning.print_plan(plan, advice, table_console(), weights=weights)


@app.command(rich_help_panel=LOOK)
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
        Path | None, typer.Option(help="Folder of a run whose cost model and lengths to use.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of all random numbers; default: run.seed.")
    ] = None,
    as_json: Json = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for simulation.json and the timeline as a picture.")
    ] = None,
) -> None:
    """Run a recipe in virtual time: how fast it would be, and how other schedules would do."""
    with _reported():
        from slipstream.backend.simulate import command

        options = command.Options(
            recipe, tuple(overrides or ()), lengths, tuple(nodes or ()), fit, seed, as_json, out
        )
        try:
            command.run(options)
        except command.SimulationFailed as error:
            raise Failed(f"failed: {error}") from None


@app.command(rich_help_panel=LOOK)
def audit(
    run: Annotated[Path, typer.Argument(help="The folder of a run that is not running now.")],
    as_json: Json = False,
    hints: Annotated[
        bool,
        typer.Option("--hints", help="Print the hints of live users' judges instead, a line of JSON each."),
    ] = False,
) -> None:
    """Recount a run from its ledger and checkpoints: nothing lost, nothing trained twice."""
    with _reported():
        from slipstream.backend.commands import audit as auditing
        from slipstream.rollout.ledger.database import LedgerError

        try:
            if hints:
                for line in auditing.hints_as_json(run):
                    typer.echo(line)
                return
            account = auditing.audit_run(run, lambda text: _errors.print(text, markup=False))
        except LedgerError as error:
            raise WrongInput(str(error)) from None
        if as_json:
            typer.echo(auditing.as_json(account))
        else:
            auditing.print_audit(account, Console(soft_wrap=True))
        if account.discrepancies:
            raise typer.Exit(Failed.exit_code)


@app.command(rich_help_panel=LOOK)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, also running ones.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page to write; default: report.html in RUN.")
    ] = None,
    audit: Annotated[bool, typer.Option(help="Recount the ledgers, which takes long for long runs.")] = True,
) -> None:
    """Write curves, staleness, time and episodes of one run or several as one page of HTML."""
    with _reported():
        from slipstream.backend.commands import report as reporting

        typer.echo(reporting.report(runs, out, audit=audit))


@app.command(rich_help_panel=LOOK)
def trace(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("trace.json"),
) -> None:
    """Write the timeline of a run's last start for Perfetto (https://ui.perfetto.dev)."""
    with _reported():
        from slipstream.backend.commands import trace as tracing

        typer.echo(tracing.write_trace(run, out))


@app.command(rich_help_panel=LOOK)
def watch(
    run: Annotated[Path, typer.Argument(help="The folder of a run, on any machine that sees it.")],
    once: Annotated[bool, typer.Option("--once", help="Print what there is now, and end.")] = False,
) -> None:
    """Show reward, staleness, queues and the time left of a run, from its files alone. Ends with Ctrl-C."""
    with _reported():
        from slipstream.backend.commands import watch as watching

        watching.watch(run, once=once)


@app.command(rich_help_panel=RUN)
def submit(
    recipe: Recipe,
    overrides: Overrides = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes; default: as many as the recipe needs.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs of a node.")] = 8,
    time: Annotated[str | None, typer.Option(help="Time limit, such as 8:00:00 or 3-00.")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Further option of sbatch, such as --sbatch=--partition=big."),
    ] = None,
    supervised: Annotated[bool, typer.Option("--sft", help="Submit `slipstream sft`.")] = False,
    resume: Resume = False,
    accept_changed_inputs: AcceptChangedInputs = False,
    overwrite: Overwrite = False,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the command and submit nothing.")
    ] = False,
) -> None:
    """Submit a recipe as a Slurm job: its nodes, its container and its time limit."""
    with _reported():
        _check_options(resume, accept_changed_inputs, overwrite)
        from slipstream.backend.commands import submit as submitting

        settings = [*(overrides or []), "cluster.type=slurm"]
        path = Path(recipe)
        config = load_supervised(path, settings).run if supervised else load_recipe(path, settings)
        flags = ["--resume"] * resume + ["--accept-changed-inputs"] * accept_changed_inputs
        flags += ["--overwrite"] * overwrite
        command, variables = submitting.sbatch_command(
            config,
            "sft" if supervised else "train",
            [recipe, *flags, *(overrides or [])],
            submitting.JobOptions(nodes, gpus_per_node, time, sbatch or []),
        )
        typer.echo((submitting.printed if only_print else submitting.submit)(command, variables))


@app.command(rich_help_panel=TOOLS)
def import_slime(
    script: Annotated[Path, typer.Argument(help="A launch script of slime. It is read, never run.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The recipe to write.")],
    as_json: Json = False,
) -> None:
    """Make a recipe of a slime launch script, and list the flags that have no counterpart."""
    with _reported():
        from slipstream.backend.commands import import_slime as importing

        recipe = importing.import_slime(script, out)
        typer.echo(importing.as_json(recipe) if as_json else "\n".join(importing.lines(recipe, out)))


@app.command(rich_help_panel=TOOLS)
def doctor(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Look also at what a run on GPUs needs, and exit with 1 without it.")
    ] = False,
    folder: Annotated[
        Path, typer.Option(help="Folder of runs whose file locks are tried (with --gpu).")
    ] = Path(),
) -> None:
    """Look at this machine, and print what Slipstream finds on it."""
    from slipstream.backend.commands.doctor import examine, print_findings

    findings = examine()
    if gpu:
        from slipstream.backend.commands.gpu_doctor import ThisMachine, examine_gpus

        findings += examine_gpus(ThisMachine(), folder)
    print_findings(findings)
    if any(finding.wrong for finding in findings):
        raise typer.Exit(Failed.exit_code)


@app.command(rich_help_panel=TOOLS)
def slurm_script() -> None:
    """Print the path of the batch script that `slipstream submit` submits, for an sbatch of your own."""
    from slipstream.backend.commands.submit import batch_script

    typer.echo(batch_script())


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
        Literal["bfloat16", "float32"] | None, typer.Option(help="Type of the weights; default: MODEL's.")
    ] = None,
    family: Family = None,
) -> None:
    """Write the weights of MODEL as a Megatron checkpoint, which any layout can load."""
    from slipstream.backend.commands import convert

    options = convert.LayoutOptions(tensor, pipeline, virtual_pipeline, expert, expert_tensor, layers)
    _convert(out, lambda: convert.hf_to_megatron(model, out, options, dtype, family or ()))


@convert.command()
def megatron_to_hf(
    checkpoint: Annotated[
        Path, typer.Argument(help="A Megatron checkpoint, or the folder of a run's checkpoints: its newest.")
    ],
    out: Out,
    model: Annotated[
        Path, typer.Option(help="HF checkpoint directory with the config and the tokenizer of the model.")
    ],
    tensor: Tensor = 1,
    pipeline: Pipeline = 1,
    virtual_pipeline: VirtualPipeline = 1,
    expert: Expert = 1,
    expert_tensor: ExpertTensor = None,
    layers: Layers = None,
    family: Family = None,
) -> None:
    """Write the weights of CHECKPOINT as an HF checkpoint directory."""
    from slipstream.backend.commands import convert

    options = convert.LayoutOptions(tensor, pipeline, virtual_pipeline, expert, expert_tensor, layers)
    _convert(out, lambda: convert.megatron_to_hf(checkpoint, out, model, options, family or ()))


@keys.command(name="add")
def add_key(
    recipe: KeysOf,
    name: KeyName,
    session: Annotated[
        str | None, typer.Option(help="The one session that the key is for; default: any session.")
    ] = None,
    side: Annotated[
        bool, typer.Option("--side", help="Do not train on its turns unless a request asks for it.")
    ] = False,
) -> None:
    """Add a key, and print it. It cannot be shown again."""
    with _reported():
        from slipstream.backend.commands import keys as keeping

        typer.echo(keeping.add(recipe, name, session=session, side=side))


@keys.command(name="list")
def list_keys(recipe: KeysOf, as_json: Json = False) -> None:
    """Print the names of all keys, revoked ones included."""
    with _reported():
        from slipstream.backend.commands import keys as keeping

        known = keeping.listed(recipe)
        if as_json:
            typer.echo(keeping.as_json(known))
        else:
            keeping.print_keys(known, Console(soft_wrap=True))


@keys.command(name="revoke")
def revoke_key(recipe: KeysOf, name: KeyName) -> None:
    """Make a key invalid, also for gateways that are running."""
    with _reported():
        from slipstream.backend.commands import keys as keeping

        keeping.revoke(recipe, name)
        typer.echo(f"{name}: revoked")


def _convert(out: Path, work: Callable[[], str]) -> None:
    from slipstream.backend.cluster.local_ranks import RankFailed

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing that was started stays
    with _reported():
        try:
            typer.echo(work())
        except (RankFailed, OSError) as error:
            notes: list[str] = getattr(error, "__notes__", [])
            raise Failed("\n".join([*notes, f"failed: {error}; there is no {out}"])) from None
        except KeyboardInterrupt:
            raise Failed(f"stopped; there is no {out}") from None


@contextmanager
def _reported() -> Iterator[None]:
    """Print what ends a command on standard error, and exit with its code."""
    try:
        yield
    except (CommandError, RecipeError) as error:
        _errors.print(str(error), markup=False)
        code = error.exit_code if isinstance(error, CommandError) else WrongInput.exit_code
        raise typer.Exit(code) from None


def main() -> None:
    """Run the command line. The user's own workflows and rewards are importable from where it is called."""
    sys.path.insert(0, os.getcwd())
    app()


if __name__ == "__main__":
    main()
