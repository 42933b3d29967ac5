"""A cost model from the model's geometry and a GPU's peak figures, for recipes that nobody has run yet.

    training   tokens per second and GPU = TRAINING * PEAK / (operations of a token, forward and backward),
               without the operations that shared prompts save
    decoding   a step reads the weights of a rank once, and the KV cache of each running request
    prefill    PREFILL * PEAK * GPUs of an engine / (operations of a token, forward)

    publishing ``publication``

The shares of the peak are assumptions, which the printed cost model shows as speeds. Settings of ``simulate``
that a recipe gives are kept, one by one; ``slipstream simulate --fit`` replaces all by measurements.
"""

import math
from typing import TypeVar

import numpy as np

from slipstream.backend.batch.flops import forward_flops
from slipstream.backend.batch.prefixes import WORTH
from slipstream.backend.memory.engine_memory import EngineMemory
from slipstream.backend.simulate.gpu_split import GpuSplit, model_of
from slipstream.backend.simulate.publication import publication
from slipstream.bridge.model.geometry import Geometry
from slipstream.bridge.shards.plan import ExportPlan
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.base import Section
from slipstream.configs.schema.simulate import (
    EngineModel,
    ResponseModel,
    SimulateConfig,
    TrainerModel,
)

S = TypeVar("S", bound=Section)

PEAK, BANDWIDTH = 989e12, 3.35e12
"""Operations (bfloat16, dense) and bytes per second of an H100 SXM, from its data sheet."""
TRAINING, TRAINING_EXPERTS, PREFILL, READING = 0.3, 0.15, 0.4, 0.6
"""Assumed shares of the peak: training a dense model and one with experts, prefill, and reading memory."""
LAYER_S = 40e-6
"""Assumed seconds of a decode step per layer besides reading: launches and the exchange between ranks."""
MOST_TOKENS = 4
"""A median completion is assumed to have one in so many of ``rollout.sampling.max_new_tokens``."""


def derived_model(
    config: RunConfig, export: ExportPlan, engine: EngineMemory, split: GpuSplit
) -> SimulateConfig:
    """Return the recipe's cost model with every setting filled in that the recipe does not give."""
    given, geometry = model_of(config), export.spec.geometry
    responses = _with(_responses(config), given.responses)
    mean = _mean(config, responses)
    length = given.prompts.median + mean
    forward = float(forward_flops(geometry, np.array([length]))[0]) / length
    derived = {
        "responses": responses,
        "engine": _with(_engine(config, geometry, engine, forward, length - mean / 2), given.engine),
        "trainer": _with(
            _trainer(config, geometry, forward * (1 - saved_flops(config, geometry))), given.trainer
        ),
        "transfer": _with(publication(config, export, engine, split), given.transfer),
    }
    return given.model_copy(update=derived)


def saved_flops(config: RunConfig, geometry: Geometry) -> float:
    """Return the share of the trainer's operations that ``actor.share_prefixes`` saves on prompts.

    The completions of a prompt that are drawn for one mini-batch compute it once. m mini-batches and n
    completions make m * (1 - (1 - 1/m)^n) prompts on average. A saving below ``prefixes.WORTH`` is not made.
    """
    given, samples = model_of(config), config.rollout.n_samples_per_prompt
    if config.actor.share_prefixes == "off":
        return 0.0
    prompt = given.prompts.median
    mean = _mean(config, _with(_responses(config), given.responses))
    whole, of_prompt = forward_flops(geometry, np.array([prompt + mean, prompt]))
    parts = config.actor.minibatches
    prompts = parts * (1 - (1 - 1 / parts) ** samples)
    saved = float((samples - prompts) * of_prompt / (samples * whole))
    return saved if saved >= WORTH else 0.0


def busy_seconds(
    config: RunConfig, export: ExportPlan, engine: EngineMemory, split: GpuSplit
) -> tuple[float, float]:
    """Return how long the tokens of a training step keep the trainer busy, and all engines, each by itself.

    A lower bound of a step's time, without the waits for each other that a simulation shows.
    """
    model = derived_model(config, export, engine, split)
    rollout, mean, prompt = config.rollout, _mean(config, model.responses), model.prompts.median
    trajectories = rollout.batch_size * rollout.n_samples_per_prompt
    tokens_per_s = model.trainer.tokens_per_s * split.trainer_gpus
    training = model.trainer.step_s + trajectories * (prompt + mean) / tokens_per_s
    cost = model.engine
    running = min(cost.max_running, trajectories / split.engines)
    if cost.kv_tokens is not None:
        running = min(running, cost.kv_tokens / (prompt + mean / 2))
    each = mean * (cost.step_s + cost.request_s * running) / running + prompt / cost.prefill_tokens_per_s
    return training, trajectories * each / split.engines


def _mean(config: RunConfig, responses: ResponseModel) -> float:
    longest = responses.cap or config.rollout.sampling.max_new_tokens
    return min(responses.median * math.exp(responses.sigma**2 / 2), longest)


def _with(derived: S, given: S) -> S:
    """Return ``derived`` with the settings that the recipe gives."""
    return derived.model_copy(update={name: getattr(given, name) for name in given.model_fields_set})


def _responses(config: RunConfig) -> ResponseModel:
    median = max(config.rollout.sampling.max_new_tokens / MOST_TOKENS, 1)
    return ResponseModel(median=median)


def _trainer(config: RunConfig, geometry: Geometry, forward: float) -> TrainerModel:
    actor = config.actor
    passes = 3.0 + (actor.recompute == "full")
    if actor.recompute_logprobs and not actor.interpolate_logprobs:
        passes += (actor.minibatches - 1) / actor.minibatches
    passes += (actor.kl is not None) + (actor.teacher_model is not None)
    share = TRAINING_EXPERTS if geometry.experts else TRAINING
    return TrainerModel(tokens_per_s=_rounded(share * PEAK / (passes * forward)))


def _engine(
    config: RunConfig, geometry: Geometry, engine: EngineMemory, forward: float, context: float
) -> EngineModel:
    ranks = config.rollout.engine.ranks
    reading = READING * BANDWIDTH
    running = config.rollout.engine.args.get("max_running_requests")
    limit = running if isinstance(running, int) else EngineModel().max_running
    return EngineModel(
        step_s=_rounded(engine.weights / reading + geometry.n_layers * LAYER_S),
        # Each cache has its share of the requests: the groups of ranks read theirs at the same time.
        request_s=_rounded(context * engine.token / reading / engine.caches),
        prefill_tokens_per_s=_rounded(PREFILL * PEAK * ranks / forward),
        max_running=limit,
        kv_tokens=engine.tokens,
    )


def _rounded(number: float) -> float:
    """Return the number with three significant digits: more would pretend to be known."""
    return float(f"{number:.3g}")
