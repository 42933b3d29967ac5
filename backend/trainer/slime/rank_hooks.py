"""The hooks of one rank, in the order in which a run comes to them.

start     custom_megatron_init ──► custom_model_provider
step      custom_megatron_before_log_prob_hook ──► custom_advantage_function ──► rollout_data_postprocess
          ──► for each update: custom_megatron_before_train_step_hook ──► the losses of ``step_hooks``
version   custom_update_weight_post_write
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.groups import groups
from slipstream.backend.trainer.hooks import RankHooks
from slipstream.backend.trainer.prepared import PreparedMicroBatch, Scores, Targets
from slipstream.backend.trainer.slime.named import NamedHook, load_hooks
from slipstream.backend.trainer.slime.samples import ContextPlace, Samples
from slipstream.backend.trainer.slime.step_hooks import HookedLoss, StepData, StepFunctions
from slipstream.configs.schema import RunConfig
from slipstream.rollout.compat.slime.arguments import SlimeArguments, slime_arguments
from slipstream.rollout.engine.client import EngineAddress
from slipstream.rollout.system import plugins

if TYPE_CHECKING:  # Megatron can only be imported once the rank has joined its groups
    from megatron.core.models.gpt import GPTModel

    from slipstream.backend.megatron.model import ModelProvider
    from slipstream.backend.megatron.trained import Trained

PREFIXES = {"policy": "", "reference": "ref_", "teacher": "teacher_"}
"""slime's ``store_prefix`` for each role of a model."""


class LearningRates:
    """Stands for ``opt_param_scheduler`` in hooks: the recipe decides learning rates, per training step."""

    def __init__(self, lr: float, step: int) -> None:
        self.num_steps = step
        self._lr = lr

    def get_lr(self, param_group: dict[str, Any] | None = None) -> float:
        """Return the learning rate of the present update."""
        return self._lr * (1.0 if param_group is None else param_group.get("lr_mult", 1.0))


class SlimeRankHooks(RankHooks):
    """The hooks that a recipe names for ranks. ``args`` is the rank's own, and the same in every call."""

    names_statistics = True

    def __init__(
        self, hooks: dict[str, NamedHook], args: SlimeArguments, *, per_token: bool, device: torch.device
    ) -> None:
        """``per_token``: the recipe averages losses over tokens."""
        self._hooks = hooks
        self._args = args
        self._device = device
        self._functions = StepFunctions(
            args,
            per_token,
            advantage=hooks.get("custom_advantage_function"),
            postprocess=hooks.get("rollout_data_postprocess"),
            weigh=hooks.get("custom_tis_function"),
            reduce=hooks.get("custom_pg_loss_reducer_function"),
            loss=hooks.get("custom_loss_function"),
        )
        self._step = 0
        self._samples: dict[int, Samples] = {}
        self._step_data: StepData | None = None
        self._engines: list[EngineAddress] = []

    # ---- start

    def start(self) -> None:
        """Call ``custom_megatron_init``: process groups exist, models do not."""
        if (hook := self._hooks.get("custom_megatron_init")) is not None:
            hook(self._args)

    @property
    def provider(self) -> "ModelProvider | None":
        hook = self._hooks.get("custom_model_provider")
        return None if hook is None else lambda *place: self._provided(hook, *place)

    def _provided(
        self, hook: NamedHook, pre_process: bool, post_process: bool, vp_stage: int | None
    ) -> "GPTModel":
        import inspect

        from megatron.core.models.gpt import GPTModel

        stage = {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(hook.function).parameters else {}
        part = hook(pre_process=pre_process, post_process=post_process, **stage)
        if not isinstance(part, GPTModel):
            raise hook.wrong(f"returns a {type(part).__name__}, expected Megatron's GPTModel")
        if (part.pre_process, part.post_process) != (pre_process, post_process):
            raise hook.wrong("returns a model of another pipeline stage than the one that was asked for")
        return part

    # ---- a step

    def step_begins(self, step: int, batch: TrainBatch, microbatches: Sequence[MicroBatch]) -> None:
        size = groups.get_context_parallel_world_size()
        group = groups.get_context_parallel_group() if size > 1 else None
        context = ContextPlace(size, groups.get_context_parallel_rank(), group)
        self._step = step
        self._samples = {id(micro): Samples(batch, micro, context, self._device) for micro in microbatches}
        self._step_data = StepData(
            self._functions, batch, [self._samples[id(micro)] for micro in microbatches]
        )

    def log_probs_begin(self, parts: Sequence[torch.nn.Module], role: str) -> None:
        if (hook := self._hooks.get("custom_megatron_before_log_prob_hook")) is not None:
            hook(self._args, list(parts), PREFIXES[role])

    def targets(
        self, scores: Sequence[Scores], targets: Sequence[Targets | None]
    ) -> Sequence[Targets | None]:
        assert self._step_data is not None
        return self._step_data.targets(self._step, scores, targets)

    def update_begins(self, number: int, trained: "Trained", lr: float) -> None:
        if (hook := self._hooks.get("custom_megatron_before_train_step_hook")) is not None:
            scheduler = LearningRates(lr, self._step)
            hook(self._args, self._step, number, list(trained.parts), trained.optimizer, scheduler)

    def loss_of(self, item: PreparedMicroBatch) -> HookedLoss:
        assert self._step_data is not None
        samples = self._samples[id(item.micro)]
        return HookedLoss(self._functions, samples, item, self._kept_M(item.micro))

    def _kept_M(self, micro: MicroBatch) -> Tensor | None:
        assert self._step_data is not None
        return self._step_data.kept.get(id(micro))

    # ---- a version

    def publication_begins(self, engines: Sequence[EngineAddress]) -> None:
        self._engines = list(engines)

    def version_written(self, folder: Path) -> None:
        if (hook := self._hooks.get("custom_update_weight_post_write")) is not None:
            hook(self._args, str(folder), list(self._engines))


def make_rank_hooks(config: RunConfig, device: torch.device) -> RankHooks:
    """Import the hooks of a recipe that run on ranks, and begin with them.

    Megatron's process groups must exist. Raises PluginError, HookError, ValueError and OSError.
    """
    assert config.rollout.hooks is not None
    hooks = load_hooks(config.rollout.hooks)
    if not hooks:
        return RankHooks()
    per_token = config.actor.averaging == "token"
    made = SlimeRankHooks(hooks, rank_arguments(config), per_token=per_token, device=device)
    made.start()
    return made


def rank_arguments(config: RunConfig) -> SlimeArguments:
    """Return ``args`` as collectors have them, with the fields of Megatron's config of the model besides."""
    from slipstream.backend.megatron.config import transformer_config
    from slipstream.backend.megatron.layer_spec import layer_spec
    from slipstream.bridge.families import model_spec
    from slipstream.bridge.model.layout import Layout

    args = slime_arguments(config)
    spec = model_spec(config.model.path, plugins.resolved(config.model.families))
    geometry, actor = spec.geometry, config.actor
    layout = Layout.of(actor.parallel, layer_spec(actor, config.model.dtype, geometry))
    dtype = getattr(torch, config.model.dtype)
    megatron = vars(transformer_config(geometry, actor, layout, dtype))
    of_the_rank = {
        "padded_vocab_size": geometry.padded_vocab(layout.tensor),
        "vocab_size": geometry.vocab,
        "max_position_embeddings": geometry.max_positions,
        "untie_embeddings_and_output_weights": not geometry.tied_embeddings,
        "rotary_base": geometry.rope.theta,
        "rotary_percent": geometry.rope.fraction,
        "rank": torch.distributed.get_rank(),
        "world_size": torch.distributed.get_world_size(),
    }
    for name, value in {**megatron, **of_the_rank}.items():
        if name not in vars(args):
            setattr(args, name, value)
    return args
