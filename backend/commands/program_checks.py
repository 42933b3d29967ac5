"""Asks Megatron and SGLang themselves what they say of a recipe's settings, without a GPU.

recipe ──► process that imports the program and makes its config ──► what the program refuses, or nothing

The import of either takes seconds. So a program is asked only if the recipe sets fields of it whose values
depend on others: most recipes set none.
"""

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace

from slipstream.backend.cluster.engine_spec import adapters_of, engine_spec
from slipstream.backend.megatron.layer_spec import layer_spec, layer_spec_on_gpus
from slipstream.bridge.families import model_spec
from slipstream.bridge.model.layout import Layout
from slipstream.configs.installed.environment import has_gpus
from slipstream.configs.schema import RunConfig
from slipstream.rollout.engine.server_process import MeetingPoint, let_import_sglang, server_args
from slipstream.rollout.system import plugins
from slipstream.rollout.system.imports import ask
from slipstream.rollout.system.network import LOOPBACK

ANSWER_TIMEOUT_S = 120.0
"""Seconds for the import of a program and its answer."""

ALONE = {
    "chunked_prefill_size",
    "decode_log_interval",
    "log_level",
    "max_running_requests",
    "max_total_tokens",
    "mem_fraction_static",
}
"""Fields of ServerArgs that SGLang compares with no others, and that rules/engine.py looks at."""

REFUSALS = (AssertionError, KeyError, NotImplementedError, TypeError, ValueError)
"""Errors with which the programs refuse a value. Others say that a program cannot be asked here."""


def program_answers(config: RunConfig, *, has_engines: bool) -> tuple[list[str], list[str]]:
    """Return what Megatron and SGLang say against the recipe, by its settings, and which of them is silent.

    ``has_engines``: False for supervised training. A program is silent that is not installed here, or whose
    import fails: only the start of the run tells what it says.
    """
    problems: list[str] = []
    notes: list[str] = []
    asked: list[tuple[str, str, str, Mapping[str, object]]] = []
    if config.actor.megatron:
        asked.append(("Megatron", "megatron_answer", "actor.megatron", config.actor.megatron))
    args = config.rollout.engine.args
    if has_engines and not args.keys() <= ALONE:
        asked.append(("SGLang", "sglang_answer", "rollout.engine.args", args))
    for program, question, section, given in asked:
        answers, ending = ask(f"{__name__}.{question}", pickle.dumps(config), 1, ANSWER_TIMEOUT_S)
        problems += [problem_of(section, given, message) for message in answers if message is not None]
        if ending is not None:
            notes.append(
                f"{program} could not be asked on this machine what it says of {section} "
                f"({', '.join(given)}): {ending.value}; the start of the run will tell"
            )
    return problems, notes


def problem_of(section: str, given: Mapping[str, object], message: str) -> str:
    """Put a program's refusal into words, with the fields of the recipe that it names.

    >>> problem_of("actor.megatron", {"a_b": 1, "c": 2}, "--a-b must be 2")
    'actor.megatron.a_b = 1: --a-b must be 2'
    """
    if message.startswith(section):
        return message
    text = message.replace("-", "_")
    named = [name for name in given if name in text] or list(given)
    settings = ", ".join(f"{section}.{name} = {json.dumps(given[name], default=str)}" for name in named)
    return f"{settings}: {' '.join(message.split())}"


def megatron_answer(request: bytes) -> Iterator[str | None]:
    """Yield what Megatron says of the model's config; None: it makes it."""
    import torch

    from slipstream.backend.megatron.parallel import prepare_imports

    prepare_imports()
    from slipstream.backend.megatron.config import transformer_config
    from slipstream.backend.megatron.fusions import KernelSupport, chosen_fusions

    config: RunConfig = pickle.loads(request)
    actor, for_gpus = config.actor, config.cluster.device == "gpu"
    geometry = model_spec(config.model.path, plugins.resolved(config.model.families)).geometry
    layers = (layer_spec_on_gpus if for_gpus else layer_spec)(actor, config.model.dtype, geometry)
    machine = KernelSupport(True, True, True) if for_gpus else KernelSupport.present()
    try:
        fused = chosen_fusions(geometry, layers, machine, actor.megatron)
        # Megatron asks whether what a kernel needs is installed, which it may not be on this machine.
        fields = {name: value for name, value in actor.megatron.items() if name not in fused}
        actor = actor.model_copy(update={"megatron": fields | dict.fromkeys(fused, False)})
        layout = Layout.of(actor.parallel, layers)
        transformer_config(geometry, actor, layout, getattr(torch, config.model.dtype))
    except REFUSALS as error:
        yield str(error) or repr(error)
    yield None


def asked_arguments(config: RunConfig) -> dict[str, object]:
    """Return the arguments of the first server of a policy's engine, as a run would start it."""
    model, device = config.model, config.cluster.device
    on_gpus = has_gpus() if device == "auto" else device == "gpu"
    adapters = adapters_of(config, model_spec(model.path, plugins.resolved(model.families)))
    spec = engine_spec(config, model.path, "cuda" if on_gpus else "cpu", adapters)
    meeting = MeetingPoint(LOOPBACK, 1) if spec.nodes > 1 or spec.data_parallel > 1 else None
    rests = on_gpus and config.rollout.engine.takes_turns
    return server_args(replace(spec, host=LOOPBACK, meeting=meeting, rests=rests))


def sglang_answer(request: bytes) -> Iterator[str | None]:
    """Yield what SGLang says of an engine's arguments; None: it takes them."""
    config: RunConfig = pickle.loads(request)
    let_import_sglang()
    from slipstream.rollout.engine.launch import check_arguments

    try:
        check_arguments(asked_arguments(config))
    except REFUSALS as error:
        yield str(error) or repr(error)
    yield None
