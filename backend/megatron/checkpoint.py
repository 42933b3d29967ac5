"""The trainer's whole state as a checkpoint that any parallel layout of the same models can load.

It holds, for the policy and for a critic, weights, float32 main parameters, Adam's moments and the number of
updates; for an average of the policy its weights; and each rank's random states. The learning rate is a
function of the training step, so the step is all of its state. Settings (weight decay, betas, the kind of
optimizer) belong to the recipe, not to the checkpoint.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.megatron import optimizer_state, random_state
from slipstream.backend.megatron.checkpoint_writer import BackgroundSave, HostCopies, agree
from slipstream.backend.megatron.finite import require_finite
from slipstream.backend.megatron.frozen import FrozenModel
from slipstream.backend.megatron.node_checkpoint import NodeCheckpoints
from slipstream.backend.megatron.random_state import RandomStates
from slipstream.backend.megatron.trained import Trained
from slipstream.backend.megatron.weights import ADAPTERS, content_of, differences, sharded_weights, take_over
from slipstream.bridge.group.pinned import PinnedPool
from slipstream.bridge.model.geometry import Geometry
from slipstream.configs.schema import ActorConfig

POLICY, CRITIC, AVERAGE = "", "critic.", "average."
"""Prefixes of the names of each model's weights in the files."""

REST = "rest"
"""Name of what a rank's share has besides tensors: torch's file format, as uint8 [bytes]."""


class _About(TypedDict):
    """The description of itself that a checkpoint carries."""

    step: int
    updates: dict[str, int]
    """Updates that Adam has made, by the model's prefix."""
    content: dict[str, object]
    layout: dict[str, object]


class RankCheckpoints:
    """Saves and loads one rank's share. ``begin``, ``finish`` and ``load`` are collective.

    trained: models by the prefix of their names in the files, first the policy, whose prefix is empty.
    average: the moving average of the policy. nodes: keeps shares on the disks of nodes; None: nothing does.
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
        nodes: NodeCheckpoints | None = None,
    ) -> None:
        self._trained = trained
        self._average = average
        self._seed = seed
        self._finish_timeout_s = finish_timeout_s
        self._nodes = nodes
        self._problems: list[str] = []
        """What has failed of the shares of the checkpoint that is being written."""
        self._running: BackgroundSave | None = None
        self._pool = PinnedPool()
        weight = next(trained[POLICY].parts[0].parameters())
        # Where it began and how it is served change nothing that a checkpoint holds.
        lora = actor.lora and actor.lora.model_dump(include={"rank", "alpha", "targets"})
        self._content: dict[str, object] = {
            **content_of(geometry, weight.dtype),
            ADAPTERS: lora,
            "critic": CRITIC in trained,
            "actor.kl.reference.type": "average" if average else "checkpoint",
        }
        self._device = weight.device
        self._layout: dict[str, object] = {**actor.parallel.model_dump(), "device": weight.device.type}

    # ---- saving

    def begin(self, folder: Path, *, step: int, tokens: Mapping[int, str] | None = None) -> None:
        """Take a snapshot and start to write it into ``folder``; training may go on when this returns.

        ``tokens``: of the versions that are kept on the disks of nodes, of which the newest is this one. No
        share is written without them. An earlier checkpoint that was begun and not finished is given up.
        Raises NotFinite on every rank, before anything is written, unless all weights and optimizer states of
        all ranks are finite.
        """
        about: _About = {
            "step": step,
            "updates": {
                prefix: optimizer_state.updates(model.optimizer) for prefix, model in self._trained.items()
            },
            "content": self._content,
            "layout": self._layout,
        }
        state = self._state()
        self._require_finite(state)
        random = random_state.capture()
        self._problems = problems = []
        copies, around = None, None
        if self._nodes is not None and tokens:
            copies = self._host_copies(state, about, random)
            around = self._nodes.written(tokens, copies, problems)
        state |= {"random": self._random_states(random), "about": about}
        try:
            self._running = BackgroundSave.begin(state, folder, None if copies else self._pool, around)
        except BaseException:
            if copies is not None:
                copies.close()
            raise

    def _host_copies(
        self, state: Mapping[str, object], about: _About, random: RandomStates
    ) -> HostCopies[str] | None:
        """Return this rank's share, and put its copies into ``state``. None if there is no memory for it."""
        leaves = _leaves(state)
        rest = io.BytesIO()
        torch.save({"step": about["step"], "updates": about["updates"], "random": random}, rest)
        tensors = {name: _data(leaf).detach() for name, leaf in leaves.items()}
        tensors[REST] = torch.frombuffer(rest.getbuffer(), dtype=torch.uint8)
        try:
            copies = HostCopies(tensors, self._pool)
        except (RuntimeError, MemoryError) as error:
            self._problems.append(f"no host memory for its share: {error}")
            return None
        for name, leaf in leaves.items():
            leaf.data = copies.tensors[name]
        return copies

    @property
    def written(self) -> bool:
        """True once this rank's writing has ended, successfully or not, or if nothing is being written."""
        return self._running is None or self._running.done

    def finish(self) -> Sequence[str]:
        """Wait for the writing and make the checkpoint readable. Raises CheckpointError on all ranks.

        Returns what has failed on the disks of nodes.
        """
        if self._running is None:
            raise RuntimeError("no checkpoint is being written")
        running, self._running = self._running, None
        running.finish(self._finish_timeout_s)
        return self._problems

    def forget_on_nodes(self) -> None:
        """Delete all shares on this node."""
        if self._nodes is not None:
            self._nodes.forget()

    # ---- loading

    def load(self, folder: Path) -> int:
        """Take over the state of a checkpoint, and return its training step.

        In the layout that saved it, this rank's random states continue; in another one, they are seeded anew
        (``random_state.reseed``). Raises CheckpointError if it holds another model.
        """
        about = cast("_About", dist_checkpointing.load_common_state_dict(str(folder))["about"])
        self._check_content(folder, about["content"])
        same_layout = about["layout"] == self._layout
        state = self._state()
        if same_layout:
            state["random"] = self._random_states(None)
        loaded = cast("dict[str, object]", dist_checkpointing.load(state, str(folder)))
        for prefix, model in self._trained.items():
            take_over(model.modules, cast("dict[str, Tensor]", loaded[f"{prefix}model"]), prefix)
            # The tensors of the optimizer's state are views, so loading has filled them already.
            optimizer_state.set_updates(model.optimizer, about["updates"][prefix])
        if self._average is not None:
            self._average.take_over(cast("dict[str, Tensor]", loaded[AVERAGE]), AVERAGE)
        if same_layout:
            random_state.restore(cast("RandomStates", loaded["random"]))
        else:
            random_state.reseed(self._seed, about["step"], dist.get_rank())
        return about["step"]

    def load_from_nodes(self, tokens: Mapping[int, str]) -> tuple[int | None, int, Sequence[str]]:
        """Take over the newest version that is whole on the disks of nodes. Collective.

        Returns the version, its training step, and why newer ones were passed over; the version is None, and
        nothing is changed, if there is none. ``tokens``: of the versions that may be used. Raises
        CheckpointError on all ranks.
        """
        if self._nodes is None:
            return None, 0, ()
        version, saved, notes = self._nodes.found(tokens)
        if version is None:
            return None, 0, notes
        leaves = _leaves(self._state())
        fits = {name: (tensor.dtype, tensor.shape) for name, tensor in saved.items() if name != REST} == {
            name: (_data(leaf).dtype, _data(leaf).shape) for name, leaf in leaves.items()
        }
        agree(
            None if fits else CheckpointError(f"the share of version {version} has other tensors than here")
        )
        with torch.no_grad():
            for name, leaf in leaves.items():
                _data(leaf).copy_(saved[name])
        rest = torch.load(io.BytesIO(saved[REST].numpy().tobytes()), weights_only=True)
        for prefix, model in self._trained.items():
            optimizer_state.set_updates(model.optimizer, rest["updates"][prefix])
        random_state.restore(rest["random"])
        return version, rest["step"], notes

    def _check_content(self, folder: Path, saved: dict[str, object]) -> None:
        if differing := differences(self._content, saved):
            raise CheckpointError(
                f"{folder} is a checkpoint of something else: {'; '.join(differing)}. "
                "Use the recipe that it was written with, or another run.name"
            )

    def _require_finite(self, state: Mapping[str, object]) -> None:
        tensors = [
            {name.partition(" ")[2]: _data(leaf) for name, leaf in _leaves({key: entry}).items()}
            for key, entry in state.items()
        ]
        require_finite("numbers of the checkpoint", tensors, self._device)

    @torch.no_grad()
    def _state(self) -> dict[str, object]:
        """Return the tensors of this rank and their places in the whole models."""
        state: dict[str, object] = {}
        for prefix, model in self._trained.items():
            optimizer_state.allocate(model.optimizer)
            weights = sharded_weights(model.modules, prefix)
            state[f"{prefix}model"] = weights
            state[f"{prefix}optimizer"] = optimizer_state.sharded_state(model.optimizer, weights)
        if self._average is not None:
            state[AVERAGE] = self._average.sharded_weights(AVERAGE)
        return state

    def _random_states(self, states: RandomStates | None) -> ShardedObject:
        return ShardedObject("random", states, (dist.get_world_size(),), (dist.get_rank(),))


def _leaves(state: Mapping[str, object]) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Return this rank's tensors, by the name of their entry of the state and their own."""
    found: dict[str, ShardedTensor | ShardedTensorFactory] = {}
    for key, entry in state.items():
        for name, value in cast("dict[str, object]", entry).items():
            leaves = cast("list[object]", value) if isinstance(value, list) else [value]
            for number, leaf in enumerate(leaves):
                if isinstance(leaf, ShardedTensor | ShardedTensorFactory) and leaf.data is not None:
                    found[f"{key} {name}, part {number}" if number else f"{key} {name}"] = leaf
    return found


def _data(leaf: ShardedTensor | ShardedTensorFactory) -> Tensor:
    assert leaf.data is not None
    return leaf.data
