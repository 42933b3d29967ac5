"""Fits the cost model to the trace of a run, so that a simulation of the run takes as long as the run did.

Legend: R requests, S training steps.

Decoding. Between its first and its last token a request of n tokens takes n - 1 decode steps. Decoding also
stands still at times: during updates, during the prefill of prompts that join the engine, and while the KV of
all running requests is computed again after an update. With N requests running,

    seconds - paused = sum over its decode steps of (step_s + request_s * N) * (slowdown in training)
                     + (tokens prefilled or computed again) / prefill_tokens_per_s

This is linear in step_s, request_s and 1 / prefill_tokens_per_s, given the slowdown and how the request's
tokens are distributed over its time. The fit therefore tries slowdowns, solves for the other constants by
non-negative least squares, and repeats this with the tokens distributed by the constants of the round before.
Training is fitted in the same way:

    seconds = (step_s + tokens / (tokens_per_s * GPUs)) * (slowdown if engines decode)
"""

from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from slipstream.backend.simulate.gpu_split import layout_of, model_of
from slipstream.backend.simulate.trace import Requests, Trace
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.simulate import (
    EngineModel,
    PromptModel,
    RewardModel,
    SimulateConfig,
    TrainerModel,
    TransferModel,
)

SLOWDOWNS = np.arange(1.0, 4.01, 0.05)
"""Slowdowns that the fit tries."""

MIN_SHARE = 0.05
"""Smallest share of the time that must be with, and without, the other side at work to fit a slowdown. With
less, the slowdown cannot be separated from the other constants."""

ROUNDS = 4
"""Rounds of least squares. Each distributes the tokens by the constants of the round before."""

MIN_GROUPED = 0.5
"""Smallest share of the requests that must belong to a group for groups to be used; the rest may be
evaluations."""


@dataclass(frozen=True)
class Residual:
    """Quality of the fit of one part of the model. Times are in seconds."""

    what: str
    measured: int
    """Number of observations."""
    mean: float
    """Mean of the observed times."""
    rms: float
    """Root mean square of the difference between observed and modelled times."""


@dataclass(frozen=True)
class Fitted:
    """A cost model that was fitted to a run."""

    model: SimulateConfig
    lengths: np.ndarray
    """Response lengths, [groups, samples] or [L]: see ``Workload``."""
    residuals: tuple[Residual, ...]
    notes: tuple[str, ...]
    """Remarks about what the trace does not contain."""


def fit(config: RunConfig, trace: Trace) -> Fitted:
    """Fit the cost model of the run's recipe. Constants that the trace does not contain are kept."""
    model, notes = model_of(config), []
    requests, interrupted = trace.requests, float(np.mean(trace.requests.interrupted_R))
    engine, decoding = _fit_engine(config, trace)
    trainer, training = _fit_trainer(config, trace)
    reward = RewardModel(median_s=0.0) if config.simulate is None else model.reward
    notes.append(
        "rewards are not timed in a trace: "
        + ("taken as instantaneous" if config.simulate is None else "simulate.reward of the recipe is kept")
    )
    if engine.slowdown == 1.0:
        notes.append("engine.slowdown: none seen")
    if interrupted:
        notes.append(f"{interrupted:.1%} of the requests were cut off; lengths are those of the others")
    whole = requests.chosen(~requests.interrupted_R & (requests.start_R >= trace.begin_s))
    stall_s, bytes_sent = float(trace.stall_S.mean()), float(trace.bytes_S.mean())
    transfer = TransferModel(
        bytes=round(bytes_sent),
        bytes_per_s=bytes_sent / stall_s,
        pause_s=0.0,
        prepare_s=float((trace.publish_S - trace.stall_S).clip(0).mean()),
    )
    publishing = Residual("pause of a publication", len(trace.stall_S), stall_s, float(trace.stall_S.std()))
    fitted = model.model_copy(
        update={
            "engine": engine,
            "trainer": trainer,
            "transfer": transfer,
            "reward": reward,
            "prompts": _prompts(whole),
        }
    )
    lengths = _groups(whole, config.rollout.n_samples_per_prompt)
    if lengths.ndim == 1:
        notes.append(
            "answers to one prompt cannot be told in the trace: their lengths are drawn independently"
        )
    return Fitted(fitted, lengths, (decoding, training, publishing), tuple(notes))


def _prompts(requests: Requests) -> PromptModel:
    logs = np.log(requests.prompt_tokens_R)
    return PromptModel(
        median=float(np.exp(logs.mean())), sigma=float(logs.std()), cap=int(requests.prompt_tokens_R.max())
    )


def _groups(requests: Requests, samples: int) -> np.ndarray:
    """Return lengths [groups, samples], or [R] if the trace does not show groups.

    The requests of a group start one right after the other. In the order of starts, ``samples`` consecutive
    requests with prompts of equal length are therefore a group. Evaluations come in between, with one request
    per prompt.
    """
    order = np.argsort(requests.start_R, kind="stable")
    prompts, lengths = requests.prompt_tokens_R[order], requests.new_tokens_R[order]
    groups, first = [], 0
    while first + samples <= len(prompts):
        if (prompts[first : first + samples] == prompts[first]).all():
            groups.append(lengths[first : first + samples])
            first += samples
        else:
            first += 1
    return np.array(groups) if samples * len(groups) >= MIN_GROUPED * len(lengths) else lengths


# ---- the engine


def _fit_engine(config: RunConfig, trace: Trace) -> tuple[EngineModel, Residual]:
    engines = [
        _EngineHistory.of(
            trace, trace.requests.chosen(trace.requests.engine_R == engine), config.weights.interrupt
        )
        for engine in np.unique(trace.requests.engine_R)
    ]
    seconds = np.concatenate([engine.active_R for engine in engines])
    share = sum(float((engine.active * engine.trains).sum()) for engine in engines)
    share /= sum(float(engine.active[engine.running > 0].sum()) for engine in engines)
    fits = []
    for slowdown in SLOWDOWNS if MIN_SHARE < share < 1 - MIN_SHARE else SLOWDOWNS[:1]:
        constants, rms = [1.0, 0.0, 0.0], 0.0
        for _ in range(ROUNDS):
            factors = np.concatenate(
                [engine.factors(constants[0], constants[1], slowdown) for engine in engines]
            )
            constants, rms = _least_squares(factors, seconds)
        fits.append((constants, rms, slowdown))
    (step_s, request_s, prefill_s), rms, slowdown = min(fits, key=itemgetter(1))
    args, base = config.rollout.engine.args, model_of(config).engine
    engine = base.model_copy(
        update={
            "step_s": max(step_s, 1e-6),
            "request_s": request_s,
            "prefill_tokens_per_s": 1 / max(prefill_s, 1e-9),
            "slowdown": round(float(slowdown), 2),
            "max_running": args.get("max_running_requests", base.max_running),
            "kv_tokens": args.get("max_total_tokens", base.kv_tokens),
        }
    )
    return engine, Residual("decoding one answer", len(seconds), float(seconds.mean()), rms)


@dataclass(frozen=True)
class _EngineHistory:
    """The time of one engine, cut into I intervals wherever something begins or ends on the engine."""

    active: np.ndarray
    """[I] seconds, 0 in a pause."""
    running: np.ndarray
    """[I] requests between their first token and their end."""
    trains: np.ndarray
    """[I] 1 while a step is trained, else 0."""
    first_R: np.ndarray
    """Index of the interval that begins with the first token of a request."""
    end_R: np.ndarray
    """Index of the interval that begins with the end of a request."""
    decoded_R: np.ndarray
    """Decode steps of a request."""
    prefilled_R: np.ndarray
    """Tokens that were prefilled for other requests meanwhile, or computed again after an update."""

    @classmethod
    def of(cls, trace: Trace, requests: Requests, interrupt: str) -> "_EngineHistory":
        """Return the history of the engine that served ``requests``."""
        first_R, end_R = requests.first_token_R, requests.end_R
        # A single token takes no time between the first and the last token.
        timed = (requests.new_tokens_R > 1) & (end_R > first_R)
        pause_ends, train_ends = trace.end_S, trace.end_S - trace.publish_S
        pause_begins, train_begins = trace.end_S - trace.stall_S, train_ends - trace.train_S
        edges = np.unique(
            np.concatenate([first_R, end_R, pause_begins, pause_ends, train_begins, train_ends])
        )
        middles = (edges[1:] + edges[:-1]) / 2
        order = np.argsort(first_R)
        joined, joins = _sums(requests.prompt_tokens_R[order]), first_R[order]
        prefilled_R = (
            joined[np.searchsorted(joins, end_R, "right")] - joined[np.searchsorted(joins, first_R, "right")]
        )
        if interrupt == "retract":
            again = _sums(np.array([_kv_tokens(requests, time) for time in pause_ends]))
            prefilled_R += (
                again[np.searchsorted(pause_ends, end_R)] - again[np.searchsorted(pause_ends, first_R)]
            )
        return cls(
            np.diff(edges) * (1 - _open(pause_begins, pause_ends, middles).clip(0, 1)),
            _open(first_R, end_R, middles),
            _open(train_begins, train_ends, middles).clip(0, 1),
            np.searchsorted(edges, first_R[timed]),
            np.searchsorted(edges, end_R[timed]),
            requests.new_tokens_R[timed] - 1.0,
            prefilled_R[timed],
        )

    @property
    def active_R(self) -> np.ndarray:
        """Seconds of each request, pauses excluded."""
        return self._integral_R(self.active)

    def factors(self, step_s: float, request_s: float, slowdown: float) -> np.ndarray:
        """Return the factors [R, 3] of step_s, request_s and the seconds of one prefilled token.

        The arguments are the constants of the round before, by which tokens are distributed: where a decode
        step takes longer, there are fewer tokens in the same time.
        """
        factor = 1 + (slowdown - 1) * self.trains
        tokens = self.active / np.maximum((step_s + request_s * self.running) * factor, 1e-9)
        tokens_R = np.maximum(self._integral_R(tokens), 1e-9)
        step_R = self._integral_R(tokens * factor) / tokens_R
        request_R = self._integral_R(tokens * factor * self.running) / tokens_R
        return np.stack([self.decoded_R * step_R, self.decoded_R * request_R, self.prefilled_R], axis=1)

    def _integral_R(self, values: np.ndarray) -> np.ndarray:
        so_far = _sums(values)
        return so_far[self.end_R] - so_far[self.first_R]


def _sums(values: np.ndarray) -> np.ndarray:
    """Return the sum of the values before each value, and the sum of all."""
    return np.concatenate([[0.0], np.cumsum(values)])


def _open(begins: np.ndarray, ends: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the number of intervals that contain each time."""
    return np.searchsorted(np.sort(begins), times) - np.searchsorted(np.sort(ends), times)


def _kv_tokens(requests: Requests, time: float) -> float:
    """Return the tokens of the requests that run at ``time``, taken to come at a constant rate."""
    running = requests.chosen((requests.first_token_R < time) & (requests.end_R > time))
    share = (time - running.first_token_R) / (running.end_R - running.first_token_R)
    return float((running.prompt_tokens_R + share * running.new_tokens_R).sum())


# ---- the trainer


def _fit_trainer(config: RunConfig, trace: Trace) -> tuple[TrainerModel, Residual]:
    """Fit the time of a step without waiting and publishing, but with the time since the step before."""
    between_S = np.concatenate([[0.0], np.diff(trace.end_S) - trace.step_S[1:]])
    seconds_S = trace.step_S - trace.wait_S - trace.publish_S + between_S
    begins_S = trace.end_S - trace.publish_S - trace.train_S
    decoding_S = _open(trace.requests.first_token_R, trace.requests.end_R, begins_S) > 0
    factors = np.stack([np.ones(len(seconds_S)), trace.tokens_S.astype(float)], axis=1)
    fits = []
    for slowdown in SLOWDOWNS if MIN_SHARE < decoding_S.mean() < 1 - MIN_SHARE else SLOWDOWNS[:1]:
        slowed = np.where(decoding_S, slowdown, 1.0)[:, None]
        fits.append((*_least_squares(factors * slowed, seconds_S), slowdown))
    (step_s, token_s), rms, slowdown = min(fits, key=itemgetter(1))
    trainer = TrainerModel(
        tokens_per_s=1 / max(float(token_s), 1e-9) / layout_of(config).trainer_gpus,
        step_s=float(step_s),
        slowdown=round(float(slowdown), 2),
    )
    return trainer, Residual("training one step", len(seconds_S), float(seconds_S.mean()), rms)


def _least_squares(factors: np.ndarray, seconds: np.ndarray) -> tuple[list[float], float]:
    """Return non-negative least-squares coefficients, and the root mean square of the residuals.

    Negative coefficients are fixed at zero, the most negative one first.
    """
    used = list(range(factors.shape[1]))
    while True:
        solution, *_ = np.linalg.lstsq(factors[:, used], seconds, rcond=None)
        if len(used) == 1 or solution.min() >= 0:
            break
        used.pop(int((solution * np.abs(factors[:, used]).mean(axis=0)).argmin()))
    coefficients = np.zeros(factors.shape[1])
    coefficients[used] = solution.clip(0)
    return coefficients.tolist(), float(np.sqrt(np.mean((factors @ coefficients - seconds) ** 2)))
