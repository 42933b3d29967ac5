"""The trainer's whole state, as a checkpoint that any parallel layout of the same models can load.

Of the policy, and of a critic: weights, float32 main parameters, Adam's moments and update count. Of an
average of the policy: weights. And each rank's random states. The learning
rate is a function of the training step, so the step is all of its state. Settings (weight decay, betas, the
kind of optimizer) are the recipe's, not the checkpoint's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject

from slipstream.backend.checkpoint.folder import CheckpointError
from slipstream.backend.megatron import optimizer_state, random_state
from slipstream.backend.megatron.checkpoint_writer import BackgroundSave
from slipstream.backend.megatron.frozen import FrozenModel
from slipstream.backend.megatron.trained import Trained
from slipstream.backend.megatron.weights import ADAPTERS, content_of, differences, sharded_weights, take_over
from slipstream.bridge.model.geometry import Geometry
from slipstream.configs.schema import ActorConfig

POLICY, CRITIC, AVERAGE = "", "critic.", "average."
"""How the names of their weights begin in the files."""


class RankCheckpoints:
    """Saves and loads one rank's share. ``begin``, ``finish`` and ``load`` are collective.

    trained: by the prefix of their names in the files, first the policy, which has none. ``average``: of it.
    """

    def __init__(
        self,
        trained: Mapping[str, Trained],
        average: FrozenModel | None,
        actor: ActorConfig,
        geometry: Geometry,
        *,
        seed: int,
        finish_timeout_s: float,
    ) -> None:
        self._trained = trained
        self._average = average
        self._seed = seed
        self._finish_timeout_s = finish_timeout_s
        self._running: BackgroundSave | None = None
        weight = next(trained[POLICY].parts[0].parameters())
        lora = actor.lora and actor.lora.model_dump()
        self._content = content_of(geometry, weight.dtype) | {
            ADAPTERS: lora,
            "critic": CRITIC in trained,
            "actor.kl.reference.type": "average" if average else "checkpoint",
        }
        self._layout = actor.parallel.model_dump() | {"device": weight.device.type}

    # ---- saving

    def begin(self, folder: Path, *, step: int) -> None:
        """Take a snapshot and start to write it into ``folder``; training may go on when this returns.

        A checkpoint that was begun and not finished is given up.
        """
        state = self._state() | {
            "random": self._random_states(random_state.capture()),
            "about": {
                "step": step,
                "updates": {
                    prefix: optimizer_state.updates(one.optimizer) for prefix, one in self._trained.items()
                },
                "content": self._content,
                "layout": self._layout,
            },
        }
        self._running = BackgroundSave.begin(state, folder)

    @property
    def written(self) -> bool:
        """Has this rank's writing ended, well or not; also true when there is none."""
        return self._running is None or self._running.done

    def finish(self) -> None:
        """Wait for the writing and make the checkpoint readable. Raises CheckpointError on all ranks."""
        if self._running is None:
            raise RuntimeError("no checkpoint is being written")
        running, self._running = self._running, None
        running.finish(self._finish_timeout_s)

    # ---- loading

    def load(self, folder: Path) -> int:
        """Take over the state of a checkpoint; its training step.

        In the layout that it was saved in, this rank's random states go on; in another one, states are
        seeded anew (``random_state.reseed``). Raises CheckpointError when it holds another model.
        """
        about = dist_checkpointing.load_common_state_dict(str(folder))["about"]
        self._check_content(folder, about["content"])
        same_layout = about["layout"] == self._layout
        state = self._state()
        if same_layout:
            state["random"] = self._random_states(None)
        loaded = dist_checkpointing.load(state, str(folder))
        for prefix, one in self._trained.items():
            take_over(one.modules, loaded[f"{prefix}model"], prefix)
            # The tensors of the optimizer's state were views: they are loaded.
            optimizer_state.set_updates(one.optimizer, about["updates"][prefix])
        if self._average is not None:
            self._average.take_over(loaded[AVERAGE], AVERAGE)
        if same_layout:
            random_state.restore(loaded["random"])
        else:
            random_state.reseed(self._seed, about["step"], dist.get_rank())
        return about["step"]

    def _check_content(self, folder: Path, saved: dict[str, Any]) -> None:
        if differing := differences(self._content, saved):
            raise CheckpointError(
                f"{folder} is a checkpoint of something else: {'; '.join(differing)}. "
                "Use the recipe that it was written with, or another run.name"
            )

    @torch.no_grad()
    def _state(self) -> dict[str, Any]:
        """The tensors of this rank and their places in the whole model's."""
        found: dict[str, Any] = {}
        for prefix, one in self._trained.items():
            optimizer_state.allocate(one.optimizer)
            model = sharded_weights(one.modules, prefix)
            found[f"{prefix}model"] = model
            found[f"{prefix}optimizer"] = optimizer_state.sharded_state(one.optimizer, model)
        if self._average is not None:
            found[AVERAGE] = self._average.sharded_weights(AVERAGE)
        return found

    def _random_states(self, states: dict[str, Any] | None) -> ShardedObject:
        return ShardedObject("random", states, (dist.get_world_size(),), (dist.get_rank(),))
