"""The episode log of one collector: groups that are never trained, and evaluations, as rows of text.

    driver: a group is lost ──► bytes of its record ──┐
    evaluation has ended    ──► trajectory ───────────┴─► queue of MOST_EPISODES ──► thread: text, files

Nothing waits for the thread: an episode that finds the queue full is left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipstream.configs.schema import EpisodeLogConfig
from slipstream.rollout.collection.collector.spec import CollectorSpec
from slipstream.rollout.collection.messages import PIECE, LostGroup, PriorSample, Question
from slipstream.rollout.ledger.episode_log.files import EPISODES, EpisodeFiles, open_files
from slipstream.rollout.ledger.episode_log.rows import (
    EVALUATED,
    LoggedEpisode,
    empty_row,
    episode_row,
    is_chosen,
)
from slipstream.rollout.ledger.episode_log.token_text import load_decoder, text_when_needed
from slipstream.rollout.system.frames import as_note
from slipstream.rollout.system.log_thread import LogThread, to_stderr
from slipstream.rollout.tokens.record import (
    CorruptRecord,
    decode_chunks,
    decode_header,
    decode_piece,
    decode_trajectory,
)
from slipstream.rollout.tokens.tokenizer import Decode
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Prompt, Trajectory

MOST_EPISODES = 512
"""Lost groups and evaluation episodes that may wait for the thread."""

MOST_BYTES = 256 * 2**20
"""Bytes of them."""

BYTES_OF_TOKEN = 17
"""Bytes of a token in the arrays of a trajectory."""

Rows = list[Mapping[str, object]]


class UntrainedLog:
    """Single event loop; ``flush`` may be called in any thread."""

    def __init__(
        self,
        settings: EpisodeLogConfig,
        files: EpisodeFiles,
        decoder: Callable[[], Decode],
        note: Callable[[str], None] = to_stderr,
    ) -> None:
        """``decoder`` is called in the thread, once."""
        self._settings, self._files = settings, files
        self._text = text_when_needed(decoder)
        self._thread = LogThread(
            "episode log", MOST_EPISODES, "lost groups and evaluations", note, most_bytes=MOST_BYTES
        )

    def lost(self, group: LostGroup, chunks: memoryview) -> None:
        """Write the episodes of a group that has ended untrained. ``chunks``: those of its ``recorded``."""
        rows = partial(self._lost_rows, group, chunks)
        self._thread.offer(partial(self._write, group.step, rows), len(chunks))

    def evaluated(
        self, question: Question, prompt: Prompt, trajectory: Trajectory | None, reason: str | None = None
    ) -> None:
        """Write an evaluation episode. ``trajectory``: None if it has none. ``reason``: of its failure."""
        if is_chosen(prompt.id, self._settings.share):
            rows = partial(self._evaluated_rows, question, prompt, trajectory, reason)
            size = 0 if trajectory is None else BYTES_OF_TOKEN * len(trajectory.tokens_T)
            self._thread.offer(partial(self._write, question.step, rows), size)

    def evaluates_from(self, step: int) -> None:
        """Remove the evaluations of this training step and of later ones: they are done again."""
        self._thread.put(
            partial(self._files.drop, lambda row: row["end"] == EVALUATED and row["step"] >= step)
        )

    def flush(self) -> None:
        """Wait until everything is written, a minute at most."""
        self._thread.flush()

    # ---- in the thread

    def _write(self, step: int, rows: Callable[[], Rows]) -> None:
        self._files.append(step, rows())

    def _lost_rows(self, group: LostGroup, chunks: memoryview) -> Rows:
        prompt, reason, rows = group.prompt, group.reason or None, Rows()
        trajectories = dict(_trajectories(group.recorded, chunks))
        for number in range(group.samples):
            if number not in trajectories:
                rows.append(empty_row(group.loss, group.group, number, group.version, prompt, reason))
                continue
            for part in trajectories[number].split():
                episode = LoggedEpisode(
                    group.loss,
                    group.group,
                    number,
                    group.version,
                    part,
                    _lags(part, dict(group.lags)),
                    reason=reason,
                )
                rows.append(episode_row(episode, self._text(), self._settings.max_tokens))
        return rows

    def _evaluated_rows(
        self, question: Question, prompt: Prompt, trajectory: Trajectory | None, reason: str | None
    ) -> Rows:
        reason = None if reason is None else as_note(reason)
        if trajectory is None:
            return [empty_row(EVALUATED, prompt.id, question.sample, question.version, prompt, reason)]
        episodes = [
            LoggedEpisode(
                EVALUATED,
                prompt.id,
                question.sample,
                question.version,
                part,
                _lags(part, {}),
                reason=reason,
            )
            for part in trajectory.split()
        ]
        return [episode_row(episode, self._text(), self._settings.max_tokens) for episode in episodes]


def open_untrained_log(
    settings: EpisodeLogConfig | None, run: Path, model: Path, spec: CollectorSpec
) -> UntrainedLog | None:
    """Return the log of a collector in the folder ``run``; None: the recipe asks for none.

    ``model``: folder of the tokenizer.
    """
    if settings is None:
        return None
    files = open_files(settings, run / EPISODES, writer=spec.number, writers=spec.count, of_untrained=True)
    return UntrainedLog(settings, files, lambda: load_decoder(model))


def _trajectories(recorded: Sequence[PriorSample], chunks: memoryview) -> Iterator[tuple[int, Trajectory]]:
    """Yield the number of each episode with what is recorded of it. What cannot be read is left out."""
    start = 0
    for sample in recorded:
        end = start + sum(size for size, _ in sample.pieces)
        try:
            if sample.kind == PIECE:
                yield sample.sample, _unfinished(sample, chunks[start:end])
            else:
                yield sample.sample, decode_trajectory(chunks[start:end], decode_header(sample.header))
        except CorruptRecord:
            pass
        start = end


def _unfinished(sample: PriorSample, chunks: memoryview) -> Trajectory:
    """Return what is recorded of an episode that has not ended. Raises CorruptRecord.

    Where the record has begun again, only the pieces from there on count.
    """
    tokens, logprobs, versions = [], [], []
    header = None
    for (_, encoded), chunk in zip(sample.pieces, decode_chunks(chunks), strict=True):
        header = decode_piece(encoded)
        if header.starts_over:
            tokens, logprobs, versions = [], [], []
        lengths = [length for _, length in header.spans]
        if sum(lengths) != len(chunk.tokens):
            raise CorruptRecord(f"version spans {header.spans} for {len(chunk.tokens)} tokens")
        tokens += [chunk.context, chunk.tokens]
        logprobs += [np.zeros(len(chunk.context), np.float32), chunk.logprobs]
        versions += [
            np.full(len(chunk.context), UNSAMPLED, np.int32),
            np.repeat(np.array([version for version, _ in header.spans], np.int32), lengths),
        ]
    if header is None:
        raise CorruptRecord("an episode without pieces")
    versions_T = np.concatenate(versions)
    return Trajectory(
        np.concatenate(tokens).astype(np.int64),
        versions_T != UNSAMPLED,
        np.concatenate(logprobs),
        versions_T,
        header.finish,
        header.retractions,
    )


def _lags(trajectory: Trajectory, lags: Mapping[int, int]) -> npt.NDArray[np.int32]:
    """Return the lags of the tokens with loss whose versions have one."""
    versions_M: list[int] = trajectory.versions_T[trajectory.loss_mask_T].tolist()
    return np.array([lags[version] for version in versions_M if version in lags], np.int32)
