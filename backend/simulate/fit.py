"""Fits the cost model to a run's own trace, so that a simulation of the run takes as long as the run did.

Legend: R requests, S training steps.

Decoding. Between its first token and its last a request of n tokens sees n - 1 decode steps, and times in
which decoding stands still: updates, the prefill of prompts that join its engine, and after an update the KV
of all running requests being computed again. With N the requests that run beside it,

    seconds - paused = sum over its decode steps of (step_s + request_s * N) * (slowdown in training)
                     + (tokens prefilled or computed again) / prefill_tokens_per_s

which is linear in step_s, request_s and 1 / prefill_tokens_per_s, once the slowdown is given and it is known
how its tokens are spread over its time. So slowdowns are tried, the others are non-negative least squares,
and the tokens are spread anew with what was found, a few times. Training is fitted in the same way:

    seconds = (step_s + tokens / (tokens_per_s * GPUs)) * (slowdown if engines decode)
"""

from dataclasses import dataclass

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
"""Those that are tried."""

TELLING = 0.05
"""A slowdown is looked for if at least this share of the time is with and without the other side at work;
otherwise it cannot be told from the other constants."""


ROUNDS = 4
"""Of least squares, each with the tokens spread as the one before says."""

SEEN = 0.5
"""Groups are told apart if at least this share of the requests is in one: the rest may be evaluations."""


@dataclass(frozen=True)
class Residual:
    """How well one part of the model fits."""

    what: str
    measured: int
    """Of how many observations."""
    mean: float
    """Mean of what was observed, in seconds."""
    rms: float
    """Root mean square of what the model leaves unexplained, in seconds."""


@dataclass(frozen=True)
class Fitted:
    model: SimulateConfig
    lengths: np.ndarray
    """Of responses, [groups, samples] or [L]: see ``Workload``."""
    residuals: tuple[Residual, ...]
    notes: tuple[str, ...]
    """What the trace does not tell."""


def fit(config: RunConfig, trace: Trace) -> Fitted:
    """``config`` is the recipe of the run; what the trace says nothing about is left as it has it."""
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
        parameters=max(bytes_sent / 2, 1),
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
    """Lengths [groups, samples], or [R] where groups are not to be seen.

    The answers to one prompt are asked for one right after the other. So in the order of their starts a group
    is ``samples`` requests whose prompts are equally long. Evaluations come in between, one request a prompt.
    """
    order = np.argsort(requests.start_R, kind="stable")
    prompts, lengths = requests.prompt_tokens_R[order], requests.new_tokens_R[order]
    groups, at = [], 0
    while at + samples <= len(prompts):
        if (prompts[at : at + samples] == prompts[at]).all():
            groups.append(lengths[at : at + samples])
            at += samples
        else:
            at += 1
    return np.array(groups) if samples * len(groups) >= SEEN * len(lengths) else lengths


# ---- the engine


def _fit_engine(config: RunConfig, trace: Trace) -> tuple[EngineModel, Residual]:
    seen = [
        _Seen.of(trace, trace.requests.chosen(trace.requests.engine_R == engine), config.weights.interrupt)
        for engine in np.unique(trace.requests.engine_R)
    ]
    seconds = np.concatenate([one.active_R for one in seen])
    share = sum(float((one.active * one.trains).sum()) for one in seen)
    share /= sum(float(one.active[one.running > 0].sum()) for one in seen)
    tried = SLOWDOWNS if TELLING < share < 1 - TELLING else SLOWDOWNS[:1]
    fits = []
    for slowdown in tried:
        found, rms = [1.0, 0.0, 0.0], 0.0
        for _ in range(ROUNDS):
            factors = np.concatenate([one.factors(found[0], found[1], slowdown) for one in seen])
            found, rms = _least_squares(factors, seconds)
        fits.append((found, rms, slowdown))
    (step_s, request_s, prefill_s), rms, slowdown = min(fits, key=lambda one: one[1])
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
class _Seen:
    """One engine between the moments at which anything began or ended on it; legend: I such intervals."""

    active: np.ndarray
    """[I] seconds, 0 in a pause."""
    running: np.ndarray
    """[I] requests between their first token and their end."""
    trains: np.ndarray
    """[I] 1 while a step is trained, else 0."""
    first_R: np.ndarray
    """The interval that begins with the first token of a request."""
    end_R: np.ndarray
    """The one that begins with its end."""
    decoded_R: np.ndarray
    """Decode steps."""
    prefilled_R: np.ndarray
    """Tokens that were prefilled for others meanwhile, or computed again after an update."""

    @classmethod
    def of(cls, trace: Trace, requests: Requests, interrupt: str) -> "_Seen":
        """``requests`` are those of one engine; those of a single token say nothing."""
        first_R, end_R = requests.first_token_R, requests.end_R
        told = (requests.new_tokens_R > 1) & (end_R > first_R)
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
            np.searchsorted(edges, first_R[told]),
            np.searchsorted(edges, end_R[told]),
            requests.new_tokens_R[told] - 1.0,
            prefilled_R[told],
        )

    @property
    def active_R(self) -> np.ndarray:
        """Seconds of each request without pauses."""
        return self._integral_R(self.active)

    def factors(self, step_s: float, request_s: float, slowdown: float) -> np.ndarray:
        """[R, 3]: what step_s, request_s and the seconds of one prefilled token are to be multiplied with.

        The constants given are those of the round before: where a decode step takes longer there are fewer
        tokens in the same time.
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
    """Of the values before each one, and of all of them."""
    return np.concatenate([[0.0], np.cumsum(values)])


def _open(begins: np.ndarray, ends: np.ndarray, times: np.ndarray) -> np.ndarray:
    """How many of the intervals contain each time."""
    return np.searchsorted(np.sort(begins), times) - np.searchsorted(np.sort(ends), times)


def _kv_tokens(requests: Requests, time: float) -> float:
    """Tokens of the requests that run at a time, each of which came evenly."""
    on = (requests.first_token_R < time) & (requests.end_R > time)
    one = requests.chosen(on)
    share = (time - one.first_token_R) / (one.end_R - one.first_token_R)
    return float((one.prompt_tokens_R + share * one.new_tokens_R).sum())


# ---- the trainer


def _fit_trainer(config: RunConfig, trace: Trace) -> tuple[TrainerModel, Residual]:
    """What a step takes besides waiting and publishing, what lies between two steps included."""
    between_S = np.concatenate([[0.0], np.diff(trace.end_S) - trace.step_S[1:]])
    seconds_S = trace.step_S - trace.wait_S - trace.publish_S + between_S
    begins_S = trace.end_S - trace.publish_S - trace.train_S
    decoding_S = _open(trace.requests.first_token_R, trace.requests.end_R, begins_S) > 0
    tried = SLOWDOWNS if TELLING < decoding_S.mean() < 1 - TELLING else SLOWDOWNS[:1]
    factors = np.stack([np.ones(len(seconds_S)), trace.tokens_S.astype(float)], axis=1)
    fits = []
    for slowdown in tried:
        slowed = np.where(decoding_S, slowdown, 1.0)[:, None]
        fits.append((*_least_squares(factors * slowed, seconds_S), slowdown))
    (step_s, token_s), rms, slowdown = min(fits, key=lambda one: one[1])
    trainer = TrainerModel(
        tokens_per_s=1 / max(float(token_s), 1e-9) / layout_of(config).trainer_gpus,
        step_s=float(step_s),
        slowdown=round(float(slowdown), 2),
    )
    return trainer, Residual("training one step", len(seconds_S), float(seconds_S.mean()), rms)


def _least_squares(factors: np.ndarray, seconds: np.ndarray) -> tuple[list[float], float]:
    """The non-negative coefficients with the least squares, and the root mean square of what is left.

    Coefficients that come out negative are fixed at zero, the most negative one first.
    """
    used = list(range(factors.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(factors[:, used], seconds, rcond=None)
        if len(used) == 1 or found.min() >= 0:
            break
        used.pop(int((found * np.abs(factors[:, used]).mean(axis=0)).argmin()))
    coefficients = np.zeros(factors.shape[1])
    coefficients[used] = found.clip(0)
    return coefficients.tolist(), float(np.sqrt(np.mean((factors @ coefficients - seconds) ** 2)))
