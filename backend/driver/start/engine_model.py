"""The HF checkpoint from which engines start, and a copy of the model's if they hold it in another form.

python -m slipstream.backend.driver.start.engine_model '{"source": ..., "families": {}, "folder": ..., ...}'

Engines hold the policy as `rollout.engine.quantization` says, and get every later version in this form. If
`model.path` has another one, it is written into the run folder once, in that form. Trainer ranks read
`model.path` itself.
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

from slipstream.backend.driver.start.prepare import run_module
from slipstream.backend.trainer.engine_checkpoint import EngineCheckpoint, engine_model_of
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.hf.index import HfCheckpointError
from slipstream.bridge.model.mapping import Transposed
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.fp8 import engine_fp8, fp8_problems
from slipstream.configs.rules.models import OTHER_MODELS, model_folder
from slipstream.configs.schema import RunConfig
from slipstream.rollout.engine.model_limits import (
    READ_STACKED_EXPERTS,
    TIED_ONLY,
    TRANSPOSED_EXPERTS,
    UNSERVED,
    UNSERVED_BY_EXPERT_RANKS,
    UNTIED_ONLY,
)
from slipstream.rollout.engine.sampling import request_fields, violations
from slipstream.rollout.system import plugins


def engine_problems(config: RunConfig, spec: ModelSpec) -> list[str]:
    """Return why engines cannot hold the model on their ranks, or as `rollout.engine.quantization` says."""
    engine, family = config.rollout.engine, spec.geometry.family
    problems = list[str]()
    if engine.expert_parallel > 1 and family in UNSERVED_BY_EXPERT_RANKS:
        problems.append(
            f"rollout.engine.expert_parallel: {engine.expert_parallel}: SGLang cannot divide the experts of "
            f"{family} among ranks: {UNSERVED_BY_EXPERT_RANKS[family]}; set it to 1 and use "
            "rollout.engine.tensor_parallel"
        )
    tied = spec.geometry.tied_embeddings
    if family in (UNTIED_ONLY if tied else TIED_ONLY):
        problems.append(
            f"model.path: its head is {'tied' if tied else 'not tied'} to the embedding, and SGLang has "
            f"{family} only {'with a head of its own' if tied else 'with a tied head'}: engines would have "
            "another head; name a checkpoint whose head is as in the published models"
        )
    if family in UNSERVED:
        problems.append(
            f"model.path: SGLang cannot serve {family}: {UNSERVED[family]}; `slipstream sft` can train it"
        )
    problems += _expert_problems(spec)
    try:
        fp8 = engine_fp8(engine.quantization, spec)
    except UnsupportedModel as error:
        return [*problems, str(error)]
    if fp8 is None:
        return problems
    return problems + fp8_problems(
        spec,
        fp8,
        ranks=engine.tensor_parallel,
        expert_ranks=engine.expert_parallel,
        attention_groups=engine.data_parallel,
    )


def sampling_problems(config: RunConfig, vocab_size: int) -> list[str]:
    """Return which values of the recipe's sampling parameters no request to an engine may have."""
    samplings = {"rollout.sampling": config.rollout.sampling}
    if config.eval is not None:
        samplings["eval.sampling"] = config.eval.sampling.over(config.rollout.sampling)
    problems: dict[str, str] = {}
    for section, sampling in samplings.items():
        fields = request_fields(
            sampling, done=0, tokens_left=sampling.max_new_tokens, greedy=False, stream_interval=1
        )
        wrong = violations(cast("dict[str, object]", fields["sampling_params"]), vocab_size)
        problems |= {each: section for each in wrong if each not in problems}  # evaluations inherit values
    return [f"{section}: {each}" for each, section in problems.items()]


def _expert_problems(spec: ModelSpec) -> list[str]:
    """Return why SGLang cannot read experts that are stacked."""
    family = spec.geometry.family
    stacked = [
        mapping.split
        for layer in spec.mappings.layers
        for mapping in layer
        if mapping.stacked and len(mapping.split.hf_shapes[0]) == 2  # no bias
    ]
    if not stacked:
        return []
    if family not in READ_STACKED_EXPERTS:
        return [
            f"model.path: it stacks the experts of a layer, and SGLang reads those of {family} one by one; "
            "load it with transformers and write it with save_pretrained, which writes them so"
        ]
    order = {True: "[inputs, outputs]", False: "[outputs, inputs]"}
    found, expected = any(isinstance(split, Transposed) for split in stacked), family in TRANSPOSED_EXPERTS
    if found == expected:
        return []
    return [
        f"model.path: it stacks the experts of a layer, each as {order[found]}, and SGLang reads those of "
        f"{family} as {order[expected]}; name a checkpoint in the form that is published"
    ]


def checkpoint_notes(config: RunConfig, spec: ModelSpec, *, has_engines: bool) -> list[str]:
    """Return what the user is told of the recipe's checkpoints: what contradicts itself in them, and what
    the engines make of the policy's quantized weights.
    """
    notes = [f"model.path: {note}" for note in spec.notes]
    for model in OTHER_MODELS:
        folder = model_folder(config, model)
        if folder is not None and folder != config.model.path:
            with suppress(UnsupportedModel, HfCheckpointError, OSError):
                other = model_spec(folder, plugins.resolved(config.model.families))
                notes += [f"{model}: {note}" for note in other.notes]
    dtype, quantization = config.model.dtype, config.rollout.engine.quantization
    if spec.quantization is not None:
        stored = f"model.path: its weights are stored in {spec.quantization}"
        notes.append(f"{stored}; the trainer loads them as {dtype}")
    held = has_engines and (spec.quantization is not None or quantization is not None)
    if held:
        notes.append(f"rollout.engine.quantization: engines hold the weights in {quantization or dtype}")
    with suppress(UnsupportedModel, HfCheckpointError, OSError):  # which are told as problems
        model = engine_model_of(config.model, quantization, config.run.folder, spec)
        if has_engines and model.is_copy:
            copy = f"start from a copy of model.path that a run writes: {model.path}"
            notes = [*notes[:-1], f"{notes[-1]}, and {copy}"] if held else [*notes, f"engines {copy}"]
    return notes


async def write_engine_model(
    config: RunConfig, model: EngineCheckpoint, say: Callable[[str], None], *, again: bool = False
) -> None:
    """Write the copy, unless it is there or engines need none. ``again``: also if it is there.

    ``say``: hears what is being done. Raises PrepareFailed.
    """
    if not model.is_copy or (model.path.exists() and not again):
        return
    say("writing the weights that the engines start from")
    request = {
        "source": str(config.model.path),
        "families": config.model.families,
        "folder": str(model.path),
        "dtype": config.model.dtype,
        "quantization": config.rollout.engine.quantization,
    }
    await run_module(
        "slipstream.backend.driver.start.engine_model",
        request,
        say,
        name=f"writing a copy of {config.model.path}",
    )


def main() -> None:
    import torch

    from slipstream.bridge.hf.copy import write_copy

    request = json.loads(sys.argv[1])
    spec = model_spec(Path(request["source"]), plugins.resolved(request["families"]))
    write_copy(
        spec.path,
        spec.quantization,
        Path(request["folder"]),
        dtype=getattr(torch, request["dtype"]),
        fp8=engine_fp8(request["quantization"], spec),
        tied=spec.kept.tied,
    )


if __name__ == "__main__":
    main()
