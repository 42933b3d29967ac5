"""``slipstream submit``, ``status``, ``logs``, ``stop``: runs as jobs of Slurm, and runs on this machine."""

import os
from pathlib import Path
from typing import Annotated

import typer

from slipstream.backend.cli.options import (
    AcceptChangedInputs,
    Overrides,
    Overwrite,
    Recipe,
    Resume,
    check_options,
    reported,
)
from slipstream.backend.commands.outcome import CommandError, WrongInput
from slipstream.configs.document import read_document
from slipstream.configs.load import load_recipe, load_supervised
from slipstream.configs.violations import RecipeError

Run = Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, or the number of a Slurm job.")]


def submit(
    recipe: Recipe,
    overrides: Overrides = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes; default: as many as the recipe needs.")
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(min=0, help="GPUs of a node; default: 8, fewer where those do, 0 for CPUs."),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(envvar="SBATCH_TIMELIMIT", help="Time limit, such as 8:00:00 or 3-00."),
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Further option of sbatch, such as --sbatch=--partition=big."),
    ] = None,
    array: Annotated[
        str | None,
        typer.Option(
            metavar="SEEDS", help="One run for each seed, such as 0-3 or 1,2,5, named NAME-seedSEED."
        ),
    ] = None,
    after: Annotated[
        str | None, typer.Option(metavar="JOB", help="Start when that job has ended, however it ends.")
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
    with reported():
        check_options(resume, accept_changed_inputs, overwrite)
        from slipstream.backend.commands import submit as submitting

        settings = [*(overrides or []), "cluster.type=slurm"]
        path, site = Path(recipe), submitting.Site({}, None)
        problems = [
            f"{override}: a job of Slurm has cluster.type=slurm: leave it out"
            for override in overrides or []
            if override.startswith("cluster.type=") and override != "cluster.type=slurm"
        ]
        options = submitting.JobOptions(nodes, gpus_per_node, time, sbatch or [], array, after)
        try:
            site = submitting.this_site()
        except RecipeError as error:
            problems.append(str(error))
        try:
            config = (
                load_supervised(path, settings, site.settings).run
                if supervised
                else load_recipe(path, settings, site.settings)
            )
        except RecipeError as error:
            raise WrongInput(
                "\n".join([*problems, str(error), *submitting.option_problems(options)])
            ) from None
        if problems:
            raise WrongInput("\n".join([*problems, *submitting.option_problems(options)]))
        flags = ["--resume"] * resume + ["--accept-changed-inputs"] * accept_changed_inputs
        flags += ["--overwrite"] * overwrite
        sources = submitting.origins(path, overrides or [], site, options.sbatch)
        verb = "sft" if supervised else "train"
        words = [recipe, *flags, *(overrides or []), *submitting.own_settings(site, sources)]
        command, variables = submitting.sbatch_command(config, verb, words, options)
        if only_print:
            typer.echo(submitting.printed(command, variables, config, sources))
            return
        from slipstream.backend.commands.frozen import freeze, thaw

        data = read_document(path, settings, site.settings).data or {}
        facts = {"recipe": recipe, "overrides": overrides or [], "cluster": sources, "command": command}
        frozen, places = freeze(config.run, array, data, facts)
        command, variables = submitting.sbatch_command(config, verb, [str(frozen), *flags], options)
        cluster = submitting.slurm(config)
        for note in submitting.noted(command, os.environ, cluster):
            typer.echo(note, err=True)
        try:
            typer.echo(submitting.submit(command, variables, cluster))
        except CommandError:
            thaw(places)
            raise


def status(run: Run) -> None:
    """Say where a run stands and what it waits for, from its files and from Slurm."""
    with reported():
        from slipstream.backend.commands import manage

        manage.status(run, typer.echo)


def logs(
    run: Run,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Beginnings of names, such as trainer or engine-1; default: all."
        ),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines of each log.")] = 10,
) -> None:
    """Print the paths of a run's logs, and how they end: of the driver, the trainer, the engines."""
    with reported():
        from slipstream.backend.commands import manage

        manage.logs(run, names or [], lines, typer.echo)


def stop(
    run: Run,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Longest wait for its step and its checkpoint.")
    ] = 600.0,
) -> None:
    """End a run after its training step, with a checkpoint; at once if that takes too long."""
    with reported():
        from slipstream.backend.commands import manage

        manage.stop(run, wait, typer.echo)


def slurm_script() -> None:
    """Print the path of the batch script that `slipstream submit` submits, for an sbatch of your own."""
    from slipstream.backend.commands.submit import batch_script

    typer.echo(batch_script())
