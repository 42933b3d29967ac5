"""The objects of the recipe's that run on this rank, and checks of everything that they return.

start    each class is constructed
step     transforms ──► packing ──► term of the advantage ──► for each update: objective, penalty ──► metrics
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.batch.train_batch import StalenessViolation, TrainBatch, check_staleness
from slipstream.backend.objective.kl import Estimate
from slipstream.backend.objective.losses import LossOfTokens, Tokens
from slipstream.backend.objective.names import BATCH
from slipstream.backend.objective.policy_loss import PolicyLoss, ratio_of
from slipstream.backend.trainer.prepared import Scores
from slipstream.configs.schema import ActorConfig, PluginConfig
from slipstream.configs.schema.objective import PluginObjective
from slipstream.rollout.system.plugins import BuiltPlugin, PluginFailed
from slipstream.rollout.tokens.trajectory import Trajectory


class RankPlugins:
    """The objects that a recipe names by import path for ranks. None or empty where it names none."""

    def __init__(self, actor: ActorConfig, bound: int) -> None:
        """Construct every object. ``bound``: largest lag of a trained token. Raises PluginError."""
        self._actor = actor
        self._bound = bound
        self._transforms = _built("actor.transforms", actor.transforms)
        self._metrics = _built("actor.metrics", actor.metrics)
        self._term = None
        if actor.plugin_term is not None:
            self._term = BuiltPlugin("actor.advantage", actor.plugin_term)
        self.objective: LossOfTokens | None = None
        if isinstance(actor.objective, PluginObjective):
            self.objective = _CheckedObjective(BuiltPlugin("actor.objective", actor.objective))
        self.penalty = estimate_of(actor)

    def transformed(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch that is trained. Collective over all ranks if the recipe names transforms.

        Raises PluginFailed.
        """
        for plugin in self._transforms:
            batch = self._checked_batch(plugin, batch, plugin.call("transform", batch))
        if self._transforms and dist.is_initialized():
            _require_equal(self._transforms[-1], batch)
        return batch

    def _checked_batch(self, plugin: BuiltPlugin, before: TrainBatch, value: object) -> TrainBatch:
        if not isinstance(value, TrainBatch):
            raise plugin.wrong(
                "transform",
                f"returned {_kind(value)}, expected a TrainBatch: return `batch` to change nothing",
            )
        count = len(value.trajectories)
        lengths = {
            "group_N": len(value.group_N),
            "siblings_N": count if value.siblings_N is None else len(value.siblings_N),
            "given_rewards": count if value.given_rewards is None else len(value.given_rewards),
        }
        problems = [
            f"`{name}` of {length} trajectories, expected {count}: `batch.keeping` keeps them equal"
            for name, length in lengths.items()
            if length != count
        ]
        if value.version != before.version:
            problems.append(
                f"policy version {value.version}, expected {before.version}: leave `version` as it is"
            )
        if any(not 0 <= place < count for place in value.turn_advantages):
            problems.append("`turn_advantages` of trajectories that are not there: use `batch.keeping`")
        problems += _trajectory_problems(value) or _size_problems(before, value, self._actor)
        if problems:
            raise plugin.wrong("transform", f"returned a batch with {'; and with '.join(problems)}")
        try:
            check_staleness(value, self._bound)
        except StalenessViolation as error:
            raise plugin.wrong("transform", f"returned tokens that cannot be trained: {error}") from error
        return value

    def term(self, batch: TrainBatch, micro: MicroBatch, scores: Scores) -> Tensor | None:
        """Return the recipe's own term of the advantage, float32 [M]; None: it names none.

        Raises PluginFailed.
        """
        plugin = self._term
        if plugin is None:
            return None
        value = plugin.call("advantage", batch, micro, scores)
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        term_M = _checked_tensor(plugin, "advantage", value, (len(micro.target_M),))
        are_finite = all(math.isfinite(each.reward or 0.0) for each in batch.trajectories)
        inputs = [
            each for each in (scores.proximal_M, scores.reference_M, scores.value_M) if each is not None
        ]
        if are_finite:
            _require_finite(plugin, "advantage", term_M, inputs)
        return term_M.detach().float()

    def measured(self, batch: TrainBatch, trained: Mapping[str, float]) -> dict[str, float]:
        """Return the recipe's own metrics of a step. Raises PluginFailed."""
        found: dict[str, float] = {}
        for plugin in self._metrics:
            metrics = plugin.call("metrics", batch, trained)
            if not isinstance(metrics, Mapping):
                raise plugin.wrong("metrics", f"returned {_kind(metrics)}, expected numbers by name")
            for name, value in cast("Mapping[object, object]", metrics).items():
                found[BATCH + _checked_name(plugin, name)] = _checked_number(plugin, name, value)
        return found


def estimate_of(actor: ActorConfig) -> Estimate | None:
    """Return the estimate of the divergence by ``actor.kl.penalty``; None: the recipe names none."""
    if actor.kl is None or actor.kl.penalty is None:
        return None
    return _CheckedPenalty(BuiltPlugin("actor.kl.penalty", actor.kl.penalty))


def _built(setting: str, settings: Sequence[PluginConfig]) -> list[BuiltPlugin]:
    return [BuiltPlugin(f"{setting}[{place}]", each) for place, each in enumerate(settings)]


class _CheckedObjective:
    def __init__(self, plugin: BuiltPlugin) -> None:
        self._plugin = plugin

    def __call__(self, tokens: Tokens, old_logp_M: Tensor) -> PolicyLoss:
        """Return the loss of each token. Raises PluginFailed."""
        plugin, logp_M = self._plugin, tokens.logp_M
        value = plugin.call("loss", tokens, old_logp_M)
        if isinstance(value, PolicyLoss):
            _checked_tensor(plugin, "loss", value.ratio_T, logp_M.shape, part="`ratio_T`")
            clipped, shape = cast("object", value.clipped_T), list(logp_M.shape)
            is_tensor = isinstance(clipped, Tensor)
            if not is_tensor or clipped.dtype != torch.bool or clipped.shape != logp_M.shape:
                found = _shape(clipped) if is_tensor else _kind(clipped)
                expected = f"expected a tensor of torch.bool, of shape {shape}"
                raise plugin.wrong("loss", f"returned `clipped_T` as {found}, {expected}")
            loss = value
        else:
            nowhere_M = torch.zeros_like(logp_M, dtype=torch.bool)
            loss = PolicyLoss(cast("Tensor", value), ratio_of(logp_M, old_logp_M).detach(), nowhere_M)
        _checked_tensor(plugin, "loss", loss.loss_T, logp_M.shape, dtype=logp_M.dtype)
        if logp_M.requires_grad and not loss.loss_T.requires_grad:
            raise plugin.wrong(
                "loss",
                "returned a loss without a gradient: it does not depend on `tokens.logp_M`, or was detached",
            )
        _require_finite(plugin, "loss", loss.loss_T, (logp_M, old_logp_M, tokens.advantage_M))
        return loss


class _CheckedPenalty:
    def __init__(self, plugin: BuiltPlugin) -> None:
        self._plugin = plugin

    def __call__(self, logp_M: Tensor, reference_logp_M: Tensor) -> Tensor:
        """Return the estimate for each token. Raises PluginFailed."""
        value = self._plugin.call("estimate", logp_M, reference_logp_M)
        value_M = _checked_tensor(self._plugin, "estimate", value, logp_M.shape, dtype=logp_M.dtype)
        _require_finite(self._plugin, "estimate", value_M, (logp_M, reference_logp_M))
        return value_M


# ---- what is returned


def _checked_tensor(
    plugin: BuiltPlugin,
    method: str,
    value: object,
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype | None = None,
    part: str = "",
) -> Tensor:
    """Return ``value`` if it is a floating-point tensor of this shape. ``dtype``: None for any."""
    named = f"{part} as " if part else ""
    kind = "floating-point numbers" if dtype is None else str(dtype)
    expected = f"expected a tensor of {kind}, of shape {list(shape)}"
    if not isinstance(value, Tensor):
        raise plugin.wrong(method, f"returned {named}{_kind(value)}, {expected}")
    is_wrong = not value.is_floating_point() if dtype is None else value.dtype != dtype
    if is_wrong or tuple(value.shape) != tuple(shape):
        way_out = ""
        if value.shape == ():
            way_out = ": return one number for each token, and leave sums and means to `actor.averaging`"
        raise plugin.wrong(method, f"returned {named}{_shape(value)}, {expected}{way_out}")
    return value


def _require_finite(plugin: BuiltPlugin, method: str, value_M: Tensor, inputs: Sequence[Tensor]) -> None:
    """Raise unless all numbers are finite, or one of ``inputs`` is not: then the update is skipped."""
    is_finite_M = value_M.detach().isfinite()
    if bool(is_finite_M.all()) or not all(bool(each.detach().isfinite().all()) for each in inputs):
        return
    place = int((~is_finite_M).nonzero()[0, 0])
    raise plugin.wrong(
        method,
        f"returned {value_M[place].item()} for token {place} of {len(value_M)}, though all of its inputs are "
        "finite; expected finite numbers: bound what is exponentiated, divided or taken a logarithm of",
    )


def _size_problems(before: TrainBatch, batch: TrainBatch, actor: ActorConfig) -> list[str]:
    """Return whether too little is left to train on."""
    episodes = len(np.unique(batch.episode_N))
    tokens = sum(int(each.loss_mask_T.sum()) for each in batch.trajectories)
    least = min(actor.minibatches * actor.parallel.data, len(np.unique(before.episode_N)))
    if episodes >= least and tokens:
        return []
    return [
        f"{episodes} episodes, of which {tokens} tokens carry loss; expected at least {least} episodes "
        "(actor.minibatches * actor.parallel.data) and one token: keep more of the batch"
    ]


def _trajectory_problems(batch: TrainBatch) -> list[str]:
    """Return what is wrong with single trajectories: the first of them."""
    for place, each in enumerate(batch.trajectories):
        if not isinstance(cast("object", each), Trajectory):
            return [f"{_kind(each)} in place of trajectory {place}, expected a Trajectory"]
        arrays = (each.loss_mask_T, each.logprobs_T, each.versions_T)
        if any(len(array) != len(each.tokens_T) for array in arrays) or each.loss_mask_T.dtype != np.bool_:
            return [
                f"arrays of trajectory {place} that differ in length, or a `loss_mask_T` that is not bool"
            ]
        is_live = place in batch.turn_advantages
        reward = cast("object", each.reward)
        if not (reward is None and is_live) and (
            isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward)
        ):
            return [f"the reward {reward!r} of trajectory {place}, expected a finite number"]
    return []


def _require_equal(plugin: BuiltPlugin, batch: TrainBatch) -> None:
    """Raise unless all ranks have the same batch. Collective: otherwise ranks would wait for each other."""
    digests: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(digests, _digest(batch))
    if len(set(digests)) > 1:
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        raise PluginFailed(
            f"actor.transforms: ranks {odd} have got another batch than rank 0 from {plugin.path}, or from "
            "one before it; expected the same on every rank: draw random numbers from `batch.version`, and "
            "read no clock"
        )


def _digest(batch: TrainBatch) -> bytes:
    digest = hashlib.blake2b(batch.group_N.tobytes() + batch.episode_N.tobytes(), digest_size=16)
    for each in batch.trajectories:
        digest.update(repr((each.reward, each.turn_rewards)).encode())
        for array in (each.tokens_T, each.loss_mask_T, each.logprobs_T, each.versions_T):
            digest.update(np.ascontiguousarray(array).data)
    digest.update(repr((batch.given_rewards, sorted(batch.turn_advantages.items()))).encode())
    return digest.digest()


def _checked_name(plugin: BuiltPlugin, name: object) -> str:
    if not isinstance(name, str) or not name or name.strip("/") != name or any(c.isspace() for c in name):
        raise plugin.wrong("metrics", f"returned the name {name!r}, expected text without spaces")
    return name


def _checked_number(plugin: BuiltPlugin, name: object, value: object) -> float:
    try:
        number = float(cast("float", value))
    except (TypeError, ValueError):
        number = math.nan
        value = _kind(value)
    if not math.isfinite(number):
        raise plugin.wrong("metrics", f"returned {value} as {name!r}, expected a finite number: leave it out")
    return number


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _shape(value: Tensor) -> str:
    return f"a tensor of {value.dtype}, of shape {list(value.shape)}"
