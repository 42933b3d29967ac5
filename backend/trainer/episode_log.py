"""The episode log of one data-parallel rank: what a step has trained, as rows of text.

    training step: arrays of the chosen trajectories ──► queue of MOST_STEPS ──► thread: text, JSON, files

The step copies arrays and waits for nothing: if the queue is full, the rows of the step are left out.
Legend: T tokens of a trajectory, M tokens with loss of a micro-batch.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.trainer.prepared import PreparedMicroBatch
from slipstream.configs.schema import EpisodeLogConfig
from slipstream.rollout.ledger.episode_log.files import EPISODES, EpisodeFiles, open_files
from slipstream.rollout.ledger.episode_log.rows import (
    SAVED,
    TRAINED,
    Floats,
    LoggedEpisode,
    episode_row,
    is_chosen,
)
from slipstream.rollout.ledger.episode_log.token_text import load_decoder, text_when_needed
from slipstream.rollout.system.log_thread import LogThread, to_stderr
from slipstream.rollout.tokens.tokenizer import Decode

MOST_STEPS = 2
"""Steps whose rows may wait for the thread."""


@dataclass
class StepLogProbs:
    """Log-probs that the first mini-batch's training pass gives, which no pass has computed before."""

    by_micro: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def add(self, minibatch: Sequence[PreparedMicroBatch], logp: Sequence[Tensor]) -> None:
        """Keep the log-probs [M] of each micro-batch."""
        self.by_micro |= {id(item.micro): logp_M for item, logp_M in zip(minibatch, logp, strict=False)}

    def proximal(self, item: PreparedMicroBatch) -> Tensor | None:
        """Return the proximal log-probs [M] of a micro-batch, if anything has computed them."""
        known = item.scores.proximal_M
        return self.by_micro.get(id(item.micro)) if known is None else known


class EpisodeLog:
    """Writes what one data-parallel rank trains."""

    def __init__(
        self,
        settings: EpisodeLogConfig,
        files: EpisodeFiles,
        decoder: Callable[[], Decode],
        note: Callable[[str], None] = to_stderr,
    ) -> None:
        """``decoder`` is called in the thread, once."""
        self._settings, self._files = settings, files
        self._thread = LogThread("episode log", MOST_STEPS, "steps", note)
        self._text = text_when_needed(decoder)

    def step_ends(
        self,
        step: int,
        batch: TrainBatch,
        minibatches: Sequence[Sequence[PreparedMicroBatch]],
        logprobs: StepLogProbs,
    ) -> None:
        """Record training step ``step``, the first of which is 1."""
        episodes = list(chosen_episodes(batch, minibatches, logprobs, self._settings.share))
        self._thread.offer(lambda: self._write(step, episodes))

    def saved(self, step: int, batch: TrainBatch) -> None:
        """Record a batch that is saved instead of being trained. Waits while the queue is full."""
        numbers = _numbers_in_group(batch)
        episodes = [
            LoggedEpisode(
                SAVED,
                int(batch.group_N[number]),
                numbers[number],
                batch.version,
                trajectory,
                batch.lag_T(trajectory.versions_T[trajectory.loss_mask_T]),
            )
            for number, trajectory in enumerate(batch.trajectories)
            if number not in batch.turn_advantages
            and is_chosen(int(batch.group_N[number]), self._settings.share)
        ]
        self._thread.put(lambda: self._write(step, episodes))

    def flush(self) -> None:
        """Wait until everything is written, a minute at most."""
        self._thread.flush()

    def _write(self, step: int, episodes: Sequence[LoggedEpisode]) -> None:
        text, most = self._text(), self._settings.max_tokens
        self._files.append(step, [episode_row(episode, text, most) for episode in episodes])


def open_episode_log(
    settings: EpisodeLogConfig | None, run: Path, model: Path, *, writer: int, writers: int
) -> EpisodeLog | None:
    """Return the log of data-parallel rank ``writer`` in the folder ``run``; None: the recipe asks for none.

    ``model``: folder of the tokenizer.
    """
    if settings is None:
        return None
    files = open_files(settings, run / EPISODES, writer=writer, writers=writers)
    return EpisodeLog(settings, files, lambda: load_decoder(model))


def chosen_episodes(
    batch: TrainBatch,
    minibatches: Sequence[Sequence[PreparedMicroBatch]],
    logprobs: StepLogProbs,
    share: float,
) -> Iterator[LoggedEpisode]:
    """Yield trajectories of recorded groups on this rank, in the order of the batch, without live ones."""
    numbers = _numbers_in_group(batch)
    columns: dict[int, tuple[Floats, Floats | None, npt.NDArray[np.int32]]] = {}
    for item in (item for minibatch in minibatches for item in minibatch):
        micro = item.micro
        if item.targets is None:
            continue
        advantage_M = _on_host(item.targets.advantage_M)
        proximal = logprobs.proximal(item)
        proximal_M = None if proximal is None else _on_host(proximal)
        for number in micro.pack:
            if number in batch.turn_advantages or not is_chosen(int(batch.group_N[number]), share):
                continue
            member_M = micro.trajectory_M == number
            columns[number] = (
                advantage_M[member_M],
                None if proximal_M is None else proximal_M[member_M],
                micro.lag_M[member_M],
            )
    for number in sorted(columns):
        advantage_M, proximal_M, lag_M = columns[number]
        yield LoggedEpisode(
            TRAINED,
            int(batch.group_N[number]),
            numbers[number],
            batch.version,
            batch.trajectories[number],
            lag_M,
            advantage_M,
            proximal_M,
        )


def _numbers_in_group(batch: TrainBatch) -> list[int]:
    """Return the number of each trajectory's episode among those of its group."""
    known: dict[int, int] = {}
    counts: Counter[int] = Counter()
    for group, episode in zip(batch.group_N.tolist(), batch.episode_N.tolist(), strict=True):
        if episode not in known:
            known[episode] = counts[group]
            counts[group] += 1
    return [known[episode] for episode in batch.episode_N.tolist()]


def _on_host(values: Tensor) -> Floats:
    return values.detach().to("cpu", torch.float32).numpy()
