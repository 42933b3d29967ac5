"""``slipstream``, the command line: names and options of its commands. Groups of commands have modules.

Exit codes: 0 done, 1 the work has failed, 2 the input was wrong, 3 a user has stopped it, 75 not yet: the
same command goes on with it, as a further start of a Slurm job does.
"""

import json
import os
import shlex
import sys
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from slipstream.backend.cli import convert, engines, jobs, keys, runs
from slipstream.backend.cli.options import (
    AcceptChangedInputs,
    DebugRolloutOnly,
    DebugTrainOnly,
    Json,
    ModelConfig,
    Overrides,
    Overwrite,
    Recipe,
    Resume,
    Sft,
    check_options,
    errors,
    hiding_modules,
    reported,
)
from slipstream.backend.commands import reference
from slipstream.backend.commands.outcome import Failed, WrongInput
from slipstream.configs.load import load_recipe, load_supervised
from slipstream.configs.schema import RunConfig, path_text
from slipstream.configs.schema.supervised import SupervisedConfig
from slipstream.configs.violations import RecipeError

RUN, LOOK, TOOLS = "Run", "Look before and after", "Tools"
"""Groups of commands in the help."""

app = typer.Typer(
    cls=reference.Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    help="Asynchronous RL training of language models: Megatron trains, SGLang generates, nobody waits.",
    epilog="A first run: `slipstream init my-run` makes a folder that trains as it is and says what is next.",
)
app.add_typer(convert.app, name="convert", cls=reference.Commands, rich_help_panel=TOOLS)
app.add_typer(engines.app, name="engine", cls=reference.Commands, rich_help_panel=RUN)
app.add_typer(keys.app, name="key", cls=reference.Commands, rich_help_panel=TOOLS)


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


def _check_halves(resume: bool, debug_rollout_only: bool, debug_train_only: Path | None) -> None:
    if debug_rollout_only and debug_train_only is not None:
        raise WrongInput(
            "--debug-rollout-only has no trainer and --debug-train-only no engines: expected one"
        )
    if resume and (debug_rollout_only or debug_train_only is not None):
        raise WrongInput(
            "--resume works for whole runs only: a run without trainer or engines starts anew (--overwrite)"
        )


@app.command(rich_help_panel=RUN, cls=reference.command_with_settings(RunConfig))
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
    with reported():
        check_options(resume, accept_changed_inputs, overwrite)
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
        print_summary(summary, sys.stdout, config.run.folder)


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
    with reported():
        check_options(resume, accept_changed_inputs, overwrite)
        from slipstream.backend.commands import serve as serving

        config = serving.load_serving(Path(recipe), overrides or [], os.environ)
        summary = serving.serve(
            config, resume=resume, accept_changed_inputs=accept_changed_inputs, overwrite=overwrite
        )
        if summary is not None:
            from slipstream.backend.monitor.summary import print_summary

            print_summary(summary, sys.stdout, config.run.folder)


@app.command(rich_help_panel=RUN, cls=reference.command_with_settings(SupervisedConfig))
def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = False,
    accept_changed_inputs: AcceptChangedInputs = False,
    overwrite: Overwrite = False,
) -> None:
    """Train a policy on responses, or a reward model on preferences, and write a Hugging Face checkpoint."""
    with reported():
        check_options(resume, accept_changed_inputs, overwrite)
        supervised = load_supervised(Path(recipe), overrides or [])
        from slipstream.backend.commands.run import sft
        from slipstream.backend.monitor.summary import commands_after_sft, print_commands

        checkpoint = sft(
            supervised, resume=resume, accept_changed_inputs=accept_changed_inputs, overwrite=overwrite
        )
        typer.echo(f"{supervised.run.run.name}: done; the checkpoint is {checkpoint}")
        print_commands(commands_after_sft(checkpoint, supervised.learn), sys.stdout)


for command in (jobs.submit, jobs.status, jobs.logs, jobs.stop):
    app.command(rich_help_panel=RUN)(command)


@app.command(rich_help_panel=LOOK)
def init(
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Your model, a Hugging Face checkpoint or hf://ORG/NAME; default: the run makes one.",
        ),
    ] = None,
) -> None:
    """Make a folder with a recipe, a reward and data, which runs as it is."""
    with reported():
        from slipstream.backend.commands.init import init

        for path in init(folder, model):
            typer.echo(f"wrote {path}")
        commands = [
            shlex.join(["cd", str(folder)]),
            "slipstream try recipe.yaml",
            "slipstream train recipe.yaml",
        ]
        typer.echo("\nnext:  " + "\n       ".join(commands))


@app.command("try", rich_help_panel=LOOK)
def try_(
    recipe: Recipe,
    overrides: Overrides = None,
    number: Annotated[int, typer.Option("--number", "-n", min=1, max=64, help="Number of episodes.")] = 4,
    as_json: Json = False,
) -> None:
    """Run a few real episodes of a recipe on one engine: texts, rewards, errors. Trains nothing."""
    with reported():
        config = load_recipe(Path(recipe), overrides or [])
        from slipstream.backend.commands.tryout import try_recipe

        try_recipe(config, number, as_json=as_json)


@app.command("eval", rich_help_panel=LOOK)
def eval_(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="A Hugging Face checkpoint, such as a run's checkpoint-hf, or hf://ORG/NAME."),
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
    with reported():
        from slipstream.backend.commands.evaluate import evaluate, prompt_sets, with_checkpoint

        if checkpoint.suffix in (".yaml", ".yml"):
            raise WrongInput(
                f"{checkpoint}: expected a checkpoint, and then the recipe: slipstream eval CHECKPOINT RECIPE"
            )
        named = f"model.path={json.dumps(path_text(checkpoint))}"
        config = load_recipe(Path(recipe), [*(overrides or []), named, "prepare=null"])
        config = with_checkpoint(config)
        evaluate(config, prompt_sets(config, sets or []), samples, temperature, as_json=as_json)


@app.command(rich_help_panel=LOOK)
def settings(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORD]...", help="Sections, settings or any words; default: all."),
    ] = None,
    sft: Sft = False,
) -> None:
    """Explain the settings of a recipe: type, default and meaning. Example: settings staleness."""
    with reported():
        chapters = reference.setting_chapters(SupervisedConfig if sft else RunConfig)
        reference.print_chapters(reference.selected(chapters, names or []), Console(highlight=False))


@app.command(rich_help_panel=LOOK)
def metrics(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Groups or tags; default: all.")
    ] = None,
) -> None:
    """Explain the metrics of a run: unit and meaning. Example: metrics staleness train/ess."""
    with reported():
        chapters = reference.selected(reference.metric_chapters(), names or [])
        reference.print_chapters(chapters, Console(highlight=False))


@app.command(rich_help_panel=LOOK)
def check(
    recipe: Recipe, overrides: Overrides = None, model_config: ModelConfig = None, sft: Sft = False
) -> None:
    """Print everything that is wrong with a recipe and its models, or that nothing is."""
    with reported():
        from slipstream.backend.commands.check import check, further_problems, read_recipe, read_supervised
        from slipstream.backend.driver.start.run_length import words_of_length

        supervised = read_supervised(recipe, overrides or [], model_config=model_config) if sft else None
        try:
            config = (
                supervised.run
                if supervised
                else read_recipe(recipe, overrides or [], model_config=model_config)
            )
        except RecipeError as error:
            raise WrongInput("\n".join([str(error), *further_problems(error)])) from None
        findings = check(config, weights=model_config is None, supervised=supervised)
        for line in [*findings.report, *findings.notes, *(f"warning: {each}" for each in findings.warnings)]:
            typer.echo(line)
        typer.echo(f"{recipe}: nothing wrong ({config.run.name}, {words_of_length(config)})")


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
    """Show layout, memory and split of the GPUs of a recipe. Needs the model's config.json, no weights.

    That of a bundled recipe's model ships.
    """
    with reported():
        from slipstream.backend.commands.check import planned, read_plannable
        from slipstream.backend.commands.plan import print_plan
        from slipstream.backend.commands.plan_document import plan_json
        from slipstream.backend.monitor.tables import table_console
        from slipstream.backend.simulate.advice import advise

        config, notes = read_plannable(recipe, overrides or [], model_config=model_config, supervised=sft)
        plan = planned(config, supervised=sft)
        advice = advise(config, plan.export, plan.engine) if split and plan.engine else None
        if as_json:
            typer.echo(plan_json(plan, advice))
        else:
            for note in notes:
                typer.echo(note)
            print_plan(plan, advice, table_console(), weights=weights)


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
    with reported():
        from slipstream.backend.commands.plan_document import costs_of
        from slipstream.backend.simulate import command

        options = command.Options(
            recipe, tuple(overrides or ()), lengths, tuple(nodes or ()), fit, seed, as_json, out
        )
        try:
            command.run(options, costs_of)
        except command.SimulationFailed as error:
            raise Failed(f"failed: {error}") from None


for command in (runs.audit, runs.report, runs.trace, runs.watch, runs.diagnose):
    app.command(rich_help_panel=LOOK)(command)


@app.command(rich_help_panel=TOOLS)
def forget(
    run: Annotated[Path, typer.Argument(help="The folder of a run that serves users, or has served them.")],
    session: Annotated[str | None, typer.Option(help="Name of the session to forget.")] = None,
    key: Annotated[
        str | None, typer.Option(help="Name of the API key whose sessions, or whose session, to forget.")
    ] = None,
) -> None:
    """Remove what users have said from a run, which never trains on it again."""
    with reported():
        from slipstream.backend.commands import forget as forgetting

        for line in forgetting.forget(run, session, key):
            typer.echo(line)


@app.command("import", rich_help_panel=TOOLS)
def import_recipe(
    system: Annotated[str, typer.Argument(help="slime, verl, areal or prime-rl.")],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE... [KEY=VALUE...]",
            help="Launch script (.sh), YAML or TOML, which is read and never run, and overrides of its keys.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The recipe to write.")],
    without_unknown: Annotated[
        bool, typer.Option("--without-unknown", help="Leave out unknown keys, such as those of a fork.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a recipe of another system's configuration, and say what becomes of each of its keys."""
    with reported():
        from slipstream.backend.commands.outcome import WrongInput
        from slipstream.rollout.compat.imports.importing import import_report

        try:
            report = import_report(system, words, out, as_json=as_json, without_unknown=without_unknown)
            typer.echo(report)
        except (ImportError, OSError, ValueError) as error:
            raise WrongInput(str(error)) from None


app.command(rich_help_panel=TOOLS)(jobs.slurm_script)


@app.command(rich_help_panel=TOOLS)
def doctor(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Look also at what a run on GPUs needs, and exit with 1 without it.")
    ] = False,
    folder: Annotated[
        Path, typer.Option(help="Folder of runs whose file locks are tried (with --gpu and --nodes).")
    ] = Path(),
    nodes: Annotated[
        int | None,
        typer.Option(
            help="Look at so many nodes of this Slurm allocation together, in the site's container, and at "
            "nothing else."
        ),
    ] = None,
) -> None:
    """Look at this machine, and print what Slipstream finds on it."""
    from slipstream.backend.commands.doctor import examine, print_findings

    if nodes is not None:
        with reported():
            _doctor_of_nodes(nodes, folder)
        return
    findings = examine()
    if gpu:
        from slipstream.backend.commands.gpu_doctor import ThisMachine, examine_gpus

        findings += examine_gpus(ThisMachine(), folder)
    print_findings(findings)
    if any(finding.wrong for finding in findings):
        raise typer.Exit(Failed.exit_code)


def _doctor_of_nodes(count: int, folder: Path) -> None:
    from slipstream.backend.commands.nodes_doctor import allocated, examine_nodes
    from slipstream.backend.commands.submit import job_variables, this_site
    from slipstream.configs.schema import SlurmCluster

    site = SlurmCluster.model_validate(this_site().settings)
    variables = os.environ | job_variables(site, site.gpus_per_node)
    is_wrong, console = False, Console(soft_wrap=True, highlight=False)
    # As slurm/train.sbatch computes it.
    ray_port = 20000 + 2 * (int(os.environ.get("SLURM_JOB_ID") or 0) % 6000)
    with closing(allocated(count, folder, variables, site.container)) as started:
        for finding in examine_nodes(started, folder, ray_port):
            console.print(f"{finding.mark} {finding.what}: {escape(finding.state)}")
            if finding.advice:
                console.print(f"    {escape(finding.advice)}")
            is_wrong = is_wrong or finding.wrong
    if is_wrong:
        raise typer.Exit(Failed.exit_code)


def run() -> None:
    """Do what the words of the command line ask for."""
    try:
        sys.path.insert(0, os.getcwd())
    except FileNotFoundError:
        errors.print("the folder where slipstream is called is not there any more: change to one that is")
        sys.exit(WrongInput.exit_code)
    for name in hiding_modules(Path()):
        errors.print(f"{name} here hides a module of that name from everything that is started: rename it")
    app()
