"""The episode log of one data-parallel rank: what a step has trained, as rows of text.

    training step: arrays of the chosen trajectories ──► queue of MOST_STEPS ──► thread: text, JSON, files

The step copies arrays and waits for nothing: if the thread is behind, the rows of a step are left out.
Legend: T tokens of a trajectory, M tokens with loss of a micro-batch.
"""

import queue
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.monitor.episode_files import EPISODES, EpisodeFiles
from slipstream.backend.trainer.prepared import PreparedMicroBatch
from slipstream.backend.trainer.token_text import Decoder, TokenText, load_decoder
from slipstream.configs.schema import EpisodeLogConfig, RunConfig
from slipstream.rollout.trajectory import UNSAMPLED, Trajectory

MOST_STEPS = 2
"""Steps whose rows may wait for the thread."""

FLUSH_TIMEOUT_S = 60.0
"""Longest wait for the thread at the end of a run."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Episode:
    """A trained trajectory, and what the step knows of its tokens with loss, float32 each."""

    group: int
    episode: int
    """Number of the episode in its group, from 0."""
    version: int
    """Policy version that the step started from."""
    trajectory: Trajectory
    lag_M: npt.NDArray[np.int32]
    advantage_M: Floats | None
    """None: nothing has found advantages."""
    proximal_M: Floats | None
    """Log-probs under the policy that the step started from; None: the recipe does not recompute them."""


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
        decoder: Callable[[], Decoder],
        note: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        """``decoder`` is called in the thread, once."""
        self._settings, self._files, self._decoder, self._note = settings, files, decoder, note
        self._queue: queue.Queue[tuple[int, list[Episode]] | threading.Event] = queue.Queue(MOST_STEPS)
        self.left_out = 0
        """Number of steps that found the thread behind."""
        self._thread = threading.Thread(target=self._run, name="episode log", daemon=True)
        self._thread.start()

    def step_ends(
        self,
        step: int,
        batch: TrainBatch,
        minibatches: Sequence[Sequence[PreparedMicroBatch]],
        logprobs: StepLogProbs,
    ) -> None:
        """Record training step ``step``, the first of which is 1."""
        episodes = list(chosen_episodes(batch, minibatches, logprobs, self._settings.share))
        try:
            self._queue.put_nowait((step, episodes))
        except queue.Full:
            self.left_out += 1
            if self.left_out.bit_count() == 1:
                self._note(f"episode log: {self.left_out} steps left out, because writing takes longer")

    def saved(self, step: int, batch: TrainBatch) -> None:
        """Record a batch that is saved in the place of being trained. Waits while the thread is behind."""
        numbers = _numbers_in_group(batch)
        episodes = [
            Episode(
                int(batch.group_N[number]),
                numbers[number],
                batch.version,
                trajectory,
                batch.lag_T(trajectory.versions_T[trajectory.loss_mask_T]),
                None,
                None,
            )
            for number, trajectory in enumerate(batch.trajectories)
            if number not in batch.turn_advantages
            and is_chosen(int(batch.group_N[number]), self._settings.share)
        ]
        self._queue.put((step, episodes))

    def flush(self) -> None:
        """Wait until everything is written, a minute at most."""
        written = threading.Event()
        try:
            self._queue.put(written, timeout=FLUSH_TIMEOUT_S)
        except queue.Full:
            return
        written.wait(FLUSH_TIMEOUT_S)

    def _run(self) -> None:
        writes = True
        text: TokenText | None = None
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            if not writes:
                continue
            step, episodes = item
            try:
                text = text or TokenText(self._decoder())
                self._files.append(step, [self._row(episode, text) for episode in episodes])
            except Exception as error:  # training goes on without the log
                writes = False
                self._note(f"no episode log from here on: {type(error).__name__}: {error}")

    def _row(self, episode: Episode, text: TokenText) -> Mapping[str, Any]:
        return episode_row(episode, text, self._settings.max_tokens)


def open_episode_log(config: RunConfig, *, writer: int, writers: int) -> EpisodeLog | None:
    """Return the log of data-parallel rank ``writer``; None: the recipe asks for none."""
    settings = config.log.episodes
    if settings is None:
        return None
    files = EpisodeFiles(
        config.run.folder / EPISODES,
        writer=writer,
        writers=writers,
        max_bytes=int(settings.max_mib * 2**20),
        max_rows=settings.max_rows,
        format=settings.format,
    )
    return EpisodeLog(settings, files, lambda: load_decoder(config.model.path))


def is_chosen(group: int, share: float) -> bool:
    """True if the episodes of a group are recorded. The same groups are on every rank and after a restart."""
    return share >= 1 or zlib.crc32(group.to_bytes(8, "little", signed=True)) < share * 2**32


def chosen_episodes(
    batch: TrainBatch,
    minibatches: Sequence[Sequence[PreparedMicroBatch]],
    logprobs: StepLogProbs,
    share: float,
) -> Iterator[Episode]:
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
        yield Episode(
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


def episode_row(episode: Episode, text: TokenText, max_tokens: int) -> Mapping[str, Any]:
    """Return the row of an episode, as JSON has it; NaN stands where a token has no such number."""
    trajectory = episode.trajectory
    ids: list[int] = trajectory.tokens_T.tolist()
    sampled_T = trajectory.versions_T != UNSAMPLED
    start = int(sampled_T.argmax()) if sampled_T.any() else len(ids)
    advantage_M = episode.advantage_M
    return {
        "group": episode.group,
        "episode": episode.episode,
        "version": episode.version,
        "prompt": text.decode(ids[:start]),
        "response": text.decode(ids[start:]),
        "reward": _number(trajectory.reward),
        "reward_parts": {name: _number(value) for name, value in trajectory.reward_parts},
        "metrics": {name: _number(value) for name, value in trajectory.metrics},
        "advantage": None if advantage_M is None or not len(advantage_M) else _number(advantage_M.mean()),
        "finish": str(trajectory.finish),
        "response_tokens": trajectory.sampled_length,
        "trained_tokens": trajectory.response_length,
        "head_lag": int(episode.lag_M.max()) if len(episode.lag_M) else None,
        "lags": [[lag, n] for lag, n in sorted(Counter(episode.lag_M.tolist()).items())],
        "spans": _spans(trajectory, start),
        "turn_rewards": [[end - start, reward] for end, reward in trajectory.turn_rewards],
        "tokens": _tokens(episode, ids, start, text, max_tokens),
    }


def _spans(trajectory: Trajectory, start: int) -> list[list[int | bool | None]]:
    """Return [version, carries loss, end] of the response's runs; the version of context is None."""
    return [
        [None if version == UNSAMPLED else version, trained, end - start]
        for version, trained, end in trajectory.header.runs
        if end > start
    ]


def _tokens(
    episode: Episode, ids: Sequence[int], start: int, text: TokenText, max_tokens: int
) -> Mapping[str, Any]:
    """Return columns with a value for each of the first tokens of the response; NaN: it has none."""
    trajectory = episode.trajectory
    end = min(len(ids), start + max_tokens)
    logprob_T = np.where(trajectory.versions_T != UNSAMPLED, trajectory.logprobs_T, np.nan)
    columns = {"logprob": logprob_T[start:end]}
    given = {"advantage": episode.advantage_M, "proximal_logprob": episode.proximal_M}
    for name, value_M in given.items():
        if value_M is not None:
            value_T = np.full(len(ids), np.nan, np.float32)
            value_T[trajectory.loss_mask_T] = value_M
            columns[name] = value_T[start:end]
    return {
        "text": text.pieces(ids[start:end]),
        # Numbers that are not finite become null in JSON.
        **{name: np.round(column.astype(np.float64), 4).tolist() for name, column in columns.items()},
    }


def _number(value: float | None) -> float | None:
    """Round to four decimals; None for what is not finite, which JSON has no number for."""
    return None if value is None or not np.isfinite(value) else round(float(value), 4)
