"""Rows of the episode log, one for each episode. Legend: T tokens of a trajectory, M tokens with loss."""

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.rollout.ledger.episode_log.token_text import TokenText
from slipstream.rollout.tokens.teacher import Floats
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Prompt, Trajectory

TRAINED = "trained"
SAVED = "saved"
"""The end of an episode whose batch was saved in place of being trained."""
EVALUATED = "evaluated"
"""The end of an episode of a held-out prompt. Every other end is a ``control.ends.Loss``."""


@dataclass(frozen=True)
class LoggedEpisode:
    """A trajectory that has ended, and what is known of its tokens with loss."""

    end: str
    group: int
    """Number of the group; of an evaluation: of the prompt."""
    episode: int
    """Number of the episode in its group, from 0."""
    version: int
    """Policy version at the end: of a trained episode, the one that the step started from."""
    trajectory: Trajectory
    lag_M: npt.NDArray[np.int32]
    """Lags at the end; empty if there are none."""
    advantage_M: Floats | None = None
    """None: nothing has found advantages."""
    proximal_M: Floats | None = None
    """Log-probs under the policy that the step started from; None: the recipe does not recompute them."""
    reason: str | None = None
    """Explains the end beyond its name, for the user."""


def is_chosen(group: int, share: float) -> bool:
    """True if the episodes of a group are recorded. The same groups are in every process and after a
    restart.
    """
    return share >= 1 or zlib.crc32(group.to_bytes(8, "little", signed=True)) < share * 2**32


def episode_row(episode: LoggedEpisode, text: TokenText, max_tokens: int) -> Mapping[str, object]:
    """Return the row of an episode, as JSON has it; NaN stands where a token has no such number."""
    trajectory = episode.trajectory
    ids: list[int] = trajectory.tokens_T.tolist()
    sampled_T = trajectory.versions_T != UNSAMPLED
    start = int(sampled_T.argmax()) if sampled_T.any() else len(ids)
    advantage_M = episode.advantage_M
    return {
        "end": episode.end,
        "group": episode.group,
        "episode": episode.episode,
        "reason": episode.reason,
        "version": episode.version,
        "prompt": text.decode(ids[:start]),
        "response": text.decode(ids[start:]),
        "reward": _number(trajectory.reward),
        "reward_parts": {name: _number(value) for name, value in trajectory.reward_parts},
        "metrics": {name: _number(value) for name, value in trajectory.metrics},
        "advantage": None if advantage_M is None or not len(advantage_M) else _number(advantage_M.mean()),
        "finish": str(trajectory.finish),
        "response_tokens": trajectory.sampled_length,
        "trained_tokens": trajectory.response_length if episode.end in (TRAINED, SAVED) else 0,
        "head_lag": int(episode.lag_M.max()) if len(episode.lag_M) else None,
        "lags": [[lag, n] for lag, n in sorted(Counter(episode.lag_M.tolist()).items())],
        "spans": _spans(trajectory, start),
        "turn_rewards": [[end - start, reward] for end, reward in trajectory.turn_rewards],
        "tokens": _tokens(episode, ids, start, text, max_tokens),
    }


def empty_row(
    end: str, group: int, episode: int, version: int, prompt: Prompt, reason: str | None
) -> Mapping[str, object]:
    """Return the row of an episode of which no token is known. Its prompt is as the prompt set has it."""
    asked = prompt.prompt
    return {
        "end": end,
        "group": group,
        "episode": episode,
        "reason": reason,
        "version": version,
        "prompt": asked if isinstance(asked, str) else json.dumps(asked, ensure_ascii=False, default=str),
        "response": "",
        "reward": None,
        "reward_parts": {},
        "metrics": {},
        "advantage": None,
        "finish": None,
        "response_tokens": 0,
        "trained_tokens": 0,
        "head_lag": None,
        "lags": [],
        "spans": [],
        "turn_rewards": [],
        "tokens": {"text": [], "logprob": []},
    }


def _spans(trajectory: Trajectory, start: int) -> list[list[int | bool | None]]:
    """Return [version, carries loss, end] of the response's runs; the version of context is None."""
    return [
        [None if version == UNSAMPLED else version, trained, end - start]
        for version, trained, end in trajectory.header.runs
        if end > start
    ]


def _tokens(
    episode: LoggedEpisode, ids: Sequence[int], start: int, text: TokenText, max_tokens: int
) -> Mapping[str, object]:
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
