"""A training step as the product's trainer does it, on a transformers model in this process.

Packing, staleness check, advantages, averages, log-probs, objective and corrections are the trainer's own
functions, called in its order. Only the forward pass and AdamW are not Megatron's.

Shapes: N trajectories, T tokens of a micro-batch, M of them with loss, B rows of a padded chunk, H hidden.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3ForCausalLM

from benchmarks.given_logits import vocab_parallel_logprob
from slipstream.backend.batch.micro_batch import MicroBatch, assemble
from slipstream.backend.batch.packing import schedule
from slipstream.backend.batch.train_batch import TrainBatch, check_staleness
from slipstream.backend.driver.start.feedback import MEMORY
from slipstream.backend.objective.advantage import ADVANTAGES
from slipstream.backend.objective.averaging import token_shares
from slipstream.backend.objective.correction import interpolated_logp
from slipstream.backend.objective.losses import Tokens, token_losses
from slipstream.backend.objective.statistics import token_statistics
from slipstream.backend.trainer.learning_rate import learning_rate
from slipstream.configs.schema import ActorConfig

CHUNKS = 2
"""Number of parts, sorted by length, in which a micro-batch is padded: less padding, same gradient."""


FAILURES, DROPPED = "failures", "failures/dropped"
"""Numbers of trajectories with a negative advantage, and of those that ``correction.negative`` drops."""


@dataclass
class StepReport:
    """Figures of one training step. Gaps are between pi_old and mu, whatever the method uses."""

    rate: float
    """Learning rate."""
    gap: float = 0.0
    """Mean of abs(log(pi_old / mu)) over the tokens of the first micro-batch, like the next two."""
    kl: float = 0.0
    """KL(mu || pi_old) per token, estimated by exp(x) - 1 - x with x = log(pi_old / mu)."""
    ess: float = 1.0
    """Effective sample size of the weights pi_old / mu over the number of tokens."""
    grad_norms: list[float] = field(default_factory=list)
    """Norm of every update before clipping."""
    totals: dict[str, float] = field(default_factory=dict)
    """Sums and maxima of ``token_statistics`` over all updates, ``FAILURES`` and ``DROPPED``."""
    first_failures: float = 0.0
    """Number of failures in the first mini-batch, where the current policy is still pi_old."""
    first_dropped: float = 0.0
    """Number of those that ``correction.negative`` drops."""

    def share(self, name: str) -> float:
        return self.totals.get(name, 0.0) / self.totals["tokens"]


class Trainer:
    """Trains a transformers model."""

    def __init__(
        self, policy: Qwen3ForCausalLM, actor: ActorConfig, *, seed: int, positives_only: bool = False
    ) -> None:
        """``positives_only``: nothing is learned from negative advantages."""
        self.policy, self._actor, self._seed = policy, actor, seed
        self._least_advantage = 0.0 if positives_only else -torch.inf
        optimizer = actor.optimizer
        self._optimizer = torch.optim.AdamW(
            policy.parameters(),
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self.version = 0
        self._mismatch: float | None = None
        """Mean of log(pi_old / mu)^2 over tokens of lag 0; None: not measured yet."""

    def train(self, batch: TrainBatch, *, max_lag: int, rate_factor: float = 1.0) -> StepReport:
        """Train on ``batch`` and move to the next version. Raises StalenessViolation."""
        check_staleness(batch, max_lag)
        self._advantage_N = self._advantages(batch)
        minibatches = self._assemble(batch)
        every_micro = list(itertools.chain.from_iterable(minibatches))
        proximal: dict[int, Tensor] = {}
        if self._actor.recompute_logprobs:
            with torch.no_grad():
                proximal = {id(micro): self._logp_and_entropy(micro)[0] for micro in every_micro}
        rate = rate_factor * learning_rate(self._actor.optimizer, self.version, run_steps=1)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        report = StepReport(rate)
        for minibatch in minibatches:
            self._update(minibatch, proximal, report)
        self.version += 1
        self._measure_mismatch(report)
        return report

    def _measure_mismatch(self, report: StepReport) -> None:
        """Average the mismatch on tokens of lag 0 over steps, as the driver does."""
        fresh = report.totals.get("fresh", 0.0)
        if fresh:
            measured, known = report.totals["fresh_square"] / fresh, self._mismatch
            self._mismatch = measured if known is None else MEMORY * known + (1 - MEMORY) * measured

    def _advantages(self, batch: TrainBatch) -> Tensor:
        tokens_N = torch.tensor([trajectory.response_length for trajectory in batch.trajectories])
        reward_N = torch.tensor([trajectory.reward for trajectory in batch.trajectories])
        term = self._actor.reward_term
        assert term is not None
        advantage_N = ADVANTAGES[term.estimator](reward_N, torch.from_numpy(batch.group_N), tokens_N)
        return (advantage_N + term.shift).clamp(min=self._least_advantage)

    def _assemble(self, batch: TrainBatch) -> list[list[MicroBatch]]:
        actor = self._actor
        tokens_N = np.array([trajectory.response_length for trajectory in batch.trajectories])
        length_N = np.array([len(trajectory.tokens_T) for trajectory in batch.trajectories])
        plan = schedule(
            length_N,
            length_N.astype(float),
            batch.episode_N,
            minibatches=actor.minibatches,
            ranks=1,
            budget=actor.microbatch_tokens,
            rng=np.random.default_rng((self._seed, self.version)),
        )
        share_N = np.zeros(len(tokens_N), np.float32)
        for (packs,) in plan:
            members = [index for pack in packs for index in pack]
            share_N[members] = token_shares(
                actor.averaging, tokens_N[members], batch.group_N[members], batch.episode_N[members]
            )
        return [[assemble(batch, pack, share_N=share_N) for pack in packs] for (packs,) in plan]

    def _update(
        self, minibatch: Sequence[MicroBatch], proximal: dict[int, Tensor], report: StepReport
    ) -> None:
        """Make one optimizer update on the mean over the tokens of ``minibatch``."""
        count = sum(len(micro.index_M) for micro in minibatch)
        is_first = not report.grad_norms
        for micro in minibatch:
            total, tokens, measured = self._loss(micro, proximal.get(id(micro)))
            (total / count).backward()
            for name, value in measured.items():
                known = report.totals.get(name, 0.0)
                report.totals[name] = max(known, value) if name.startswith("max/") else known + value
            if is_first:
                report.first_failures += measured[FAILURES]
                report.first_dropped += measured[DROPPED]
            if is_first and micro is minibatch[0]:
                # Before the first update, the current policy is pi_old.
                x_M = (tokens.logp_M.detach() - tokens.behaviour_logp_M).double()
                weight_M = x_M.exp()
                report.gap = x_M.abs().mean().item()
                report.kl = (weight_M - 1 - x_M).mean().item()
                report.ess = (weight_M.mean() ** 2 / (weight_M**2).mean()).item()
        norm = clip_grad_norm_(self.policy.parameters(), self._actor.optimizer.clip_grad)
        report.grad_norms.append(norm.item())
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss(self, micro: MicroBatch, proximal_M: Tensor | None) -> tuple[Tensor, Tokens, dict[str, float]]:
        """Return the sum of token losses, the tokens, and their statistics."""
        actor = self._actor
        logp_M, entropy_M = self._logp_and_entropy(micro)
        behaviour_M, lag_M = torch.from_numpy(micro.behaviour_logp_M), torch.from_numpy(micro.lag_M)
        if actor.interpolate_logprobs:
            proximal_M = interpolated_logp(logp_M, behaviour_M, lag_M)
        tokens = Tokens(
            logp_M=logp_M,
            behaviour_logp_M=behaviour_M,
            proximal_logp_M=proximal_M,
            advantage_M=self._advantage_N[torch.from_numpy(micro.trajectory_M)],
            lag_M=lag_M,
            owner_M=torch.from_numpy(micro.owner_M),
            owners=micro.owners,
            mismatch=self._mismatch,
        )
        loss = token_losses(actor, tokens)
        share_M = torch.from_numpy(micro.share_M)
        measured = token_statistics(
            loss=loss,
            tokens=tokens,
            share_M=share_M,
            entropy_M=entropy_M.detach(),
            reference_M=None,
            measured={},
            recomputed=actor.recompute_logprobs,
            weight_cap=actor.correction.weight_cap if actor.use_decoupled_loss else None,
        )
        failed_M = tokens.advantage_M < 0
        measured[FAILURES] = _trajectories(tokens, failed_M)
        measured[DROPPED] = _trajectories(tokens, loss.masked.get("negative", torch.zeros_like(failed_M)))
        return (share_M * loss.loss_T).sum(), tokens, {name: value.item() for name, value in measured.items()}

    def _logp_and_entropy(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return both for the tokens that carry loss, at temperature 1, under the present weights."""
        hidden_MH = self._hidden(micro)[torch.from_numpy(micro.index_M)]
        head_VH = self.policy.lm_head.weight
        return vocab_parallel_logprob(
            hidden_MH @ head_VH.T, torch.from_numpy(micro.target_M), temperature=1.0, vocab=len(head_VH)
        )

    def _hidden(self, micro: MicroBatch) -> Tensor:
        """Return hidden states [T, H]. Rows are padded on the right, where the causal mask hides padding."""
        tokens_T = torch.from_numpy(micro.tokens_T)
        starts, lengths = micro.cu_seqlens[:-1], np.diff(micro.cu_seqlens)
        rows_by_length = np.array_split(np.argsort(lengths, kind="stable"), min(CHUNKS, len(lengths)))
        hidden, positions = [], []
        for rows in rows_by_length:
            parts = [tokens_T[starts[row] : starts[row] + lengths[row]] for row in rows]
            hidden_BTH = self.policy.model(pad_sequence(parts, batch_first=True), use_cache=False)[0]
            length_B = torch.from_numpy(lengths[rows])
            hidden.append(hidden_BTH[torch.arange(hidden_BTH.shape[1]) < length_B[:, None]])
            positions += [starts[row] + np.arange(int(lengths[row])) for row in rows]
        place_T = torch.from_numpy(np.argsort(np.concatenate(positions)))
        return torch.cat(hidden)[place_T]


def _trajectories(tokens: Tokens, chosen_M: Tensor) -> Tensor:
    """Return the number of trajectories with chosen tokens."""
    return torch.tensor(len(tokens.owner_M[chosen_M].unique()))
