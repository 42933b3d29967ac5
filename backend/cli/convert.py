"""``slipstream convert``: checkpoints from Hugging Face's format into Megatron's, and back."""

import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from slipstream.backend.cli.options import reported
from slipstream.backend.commands.outcome import Failed

app = typer.Typer(
    no_args_is_help=True,
    help="Convert checkpoints from Hugging Face's format into Megatron's and back, at any layout.",
)

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


@app.command()
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
    work = partial(convert.hf_to_megatron, model, out, options, dtype, family or ())
    _convert(out, work, {_to_hf(out, out, model, family): "back into Hugging Face's format"})


@app.command()
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
    from slipstream.backend.monitor.summary import model_commands

    work = partial(convert.megatron_to_hf, checkpoint, out, model, options, family or ())
    _convert(out, work, model_commands(out))


@app.command()
def megatron_to_peft(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint of a run with actor.lora, or the folder of its checkpoints.")
    ],
    out: Out,
    model: Annotated[
        Path, typer.Option(help="HF checkpoint directory of the model that the run began with.")
    ],
    tensor: Tensor = 1,
    pipeline: Pipeline = 1,
    virtual_pipeline: VirtualPipeline = 1,
    expert: Expert = 1,
    expert_tensor: ExpertTensor = None,
    layers: Layers = None,
    family: Family = None,
) -> None:
    """Write the adapter of CHECKPOINT as a folder that PEFT loads."""
    from slipstream.backend.commands import convert

    options = convert.LayoutOptions(tensor, pipeline, virtual_pipeline, expert, expert_tensor, layers)
    work = partial(convert.megatron_to_hf, checkpoint, out, model, options, family or (), adapter_alone=True)
    merged = _to_hf(checkpoint, out, model, family)
    _convert(out, work, {merged: "the whole model, with the adapter merged into it"})


def _to_hf(checkpoint: Path, out: Path, model: Path, family: list[str] | None) -> str:
    """Return the command that makes an HF checkpoint of a Megatron checkpoint, beside ``out``."""
    own = [word for each in family or () for word in ("--family", each)]
    words = ["slipstream", "convert", "megatron-to-hf", str(checkpoint), f"{out}-hf", "--model", str(model)]
    return shlex.join([*words, *own])


def _convert(out: Path, work: Callable[[], str], then: Mapping[str, str]) -> None:
    """Do the work, and print what it has made and the commands ``then``, which go on from it."""
    from slipstream.backend.cluster.local_ranks import RankFailed
    from slipstream.backend.monitor.summary import print_commands

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing that was started stays
    with reported():
        try:
            typer.echo(work())
            print_commands(then, sys.stdout)
        except (RankFailed, OSError) as error:
            notes: list[str] = getattr(error, "__notes__", [])
            raise Failed("\n".join([*notes, f"failed: {error}; there is no {out}"])) from None
        except KeyboardInterrupt:
            raise Failed(f"stopped; there is no {out}") from None
