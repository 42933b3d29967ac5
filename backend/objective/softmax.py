"""The softmax of every token over a vocabulary that is split over ranks, accumulated block by block.

    x = logits / temperature        logp = x[target] - logsumexp(x)        entropy = logsumexp(x) - E[x]

All arithmetic is in float32. Shapes: T tokens, K further choices at each, v columns of one block of the
vocabulary.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.objective.typed_torch import typed_dist

FLOOR = -1e3
"""Stands for a distance of minus infinity to the largest logit: exp of it is 0 and 0 times it is 0."""


class Softmax:
    """Log-probs of ``target_T``, and entropies and those of ``also_TK`` if asked for, from blocks of this
    rank's logits.

    ``add`` every block, ``reduce`` once, then ask for the gradients of blocks.
    """

    def __init__(
        self,
        target_T: Tensor,
        columns: range,
        temperature: float,
        *,
        entropy: bool = True,
        also_TK: Tensor | None = None,
    ) -> None:
        """columns: the part of the vocabulary that this rank holds, without padding. also_TK: further tokens
        at each place. The log-prob of one outside the vocabulary means nothing.
        """
        self._temperature = temperature
        self.has_entropy = entropy
        self.local_T = target_T - columns.start
        """The targets as columns of this rank."""
        self._mine_T = (self.local_T >= 0) & (self.local_T < len(columns))
        self._peak_T = target_T.new_full(target_T.shape, torch.finfo(torch.float32).min, dtype=torch.float32)
        # Sums over the columns: exp, x of the target, and for entropies exp * distance to the peak.
        self._sums_kT = self._peak_T.new_zeros(3 if entropy else 2, len(target_T))
        self.also_local_TK = None if also_TK is None else also_TK - columns.start
        """The further tokens as columns of this rank."""
        self._columns = len(columns)
        self._also_TK = None if also_TK is None else self._peak_T.new_zeros(also_TK.shape)

    def add(self, logits_Tv: Tensor, scratch: "Scratch", first: int) -> None:
        """Add a block; ``first`` is its first column among this rank's."""
        x_Tv = self._scaled(logits_Tv, scratch)
        total_T, chosen_T = self._sums_kT[:2]
        column_T, here_T = self._places(first, x_Tv.shape[-1])
        chosen_T += torch.where(here_T, x_Tv.gather(-1, column_T[:, None])[:, 0], 0.0)
        self._add_also(x_Tv, first, scaled=True)
        peak_T = torch.maximum(self._peak_T, x_Tv.amax(-1))
        self._move_peak(peak_T)
        x_Tv.sub_(peak_T[:, None]).clamp_(min=FLOOR)
        if not self.has_entropy:
            total_T += x_Tv.exp_().sum(-1)
            return
        exp_Tv = torch.exp(x_Tv, out=scratch.second(x_Tv.shape))
        total_T += exp_Tv.sum(-1)
        self._sums_kT[2] += exp_Tv.mul_(x_Tv).sum(-1)

    def _add_also(self, logits_Tv: Tensor, first: int, *, scaled: bool = False) -> None:
        """Add x of the further tokens in a block. scaled: the block is x already."""
        if self.also_local_TK is None:
            return
        assert self._also_TK is not None
        column_TK, here_TK = self._also_places(self.also_local_TK, first, logits_Tv.shape[-1])
        x_TK = logits_Tv.gather(-1, column_TK).float()
        self._also_TK += torch.where(here_TK, x_TK if scaled else x_TK / self._temperature, 0.0)

    def _move_peak(self, peak_T: Tensor) -> None:
        total_T = self._sums_kT[0]
        lower_T = (self._peak_T - peak_T).clamp_(min=FLOOR)
        if self.has_entropy:
            self._sums_kT[2].add_(lower_T * total_T).mul_(lower_T.exp())
        total_T.mul_(lower_T.exp())
        self._peak_T = peak_T

    def reduce(self, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return log-probs, and entropies and log-probs of further tokens if asked for, over the columns of
        all ranks.

        Communicates one MAX and one SUM, and another SUM for further tokens.
        """
        if group is not None:
            peak_T = self._peak_T.clone()
            typed_dist.all_reduce(peak_T, dist.ReduceOp.MAX, group)
            self._move_peak(peak_T)
            typed_dist.all_reduce(self._sums_kT, dist.ReduceOp.SUM, group)
            if self._also_TK is not None:
                typed_dist.all_reduce(self._also_TK, dist.ReduceOp.SUM, group)
        total_T, chosen_T = self._sums_kT[:2]
        self._log_total_T = total_T.log()
        logp_T = chosen_T - self._peak_T - self._log_total_T
        also_TK = None
        if self._also_TK is not None:
            also_TK = self._also_TK - self._peak_T[:, None] - self._log_total_T[:, None]
        if not self.has_entropy:
            return logp_T, None, also_TK
        self._entropy_T = self._log_total_T - self._sums_kT[2] / total_T
        return logp_T, self._entropy_T.clone(), also_TK

    def gradient(
        self,
        logits_Tv: Tensor,
        scratch: "Scratch",
        first: int,
        grad_T: Tensor,
        entropy_grad_T: Tensor | None,
        also_grad_TK: Tensor | None = None,
    ) -> Tensor:
        """Return the gradient with respect to the logits of a block, in scratch memory and float32.

        d logp / dx = onehot(target) - p        d entropy / dx = -p (log p + entropy)
        """
        grad_T = chosen_T = grad_T / self._temperature
        if also_grad_TK is not None:
            grad_T = grad_T + also_grad_TK.sum(-1) / self._temperature  # each log-prob has its own -p
        x_Tv = self._scaled(logits_Tv, scratch).sub_(self._peak_T[:, None]).clamp_(min=FLOOR)
        scale_T = -1 / self._sums_kT[0]
        if entropy_grad_T is None:
            d_Tv = x_Tv.exp_().mul_((scale_T * grad_T)[:, None])
        else:
            entropy_grad_T = entropy_grad_T / self._temperature
            exp_Tv = torch.exp(x_Tv, out=scratch.second(x_Tv.shape)).mul_(scale_T[:, None])
            offset_T = self._entropy_T - self._log_total_T
            d_Tv = (
                x_Tv.add_(offset_T[:, None]).mul_(entropy_grad_T[:, None]).add_(grad_T[:, None]).mul_(exp_Tv)
            )
        column_T, here_T = self._places(first, d_Tv.shape[-1])
        d_Tv.scatter_add_(-1, column_T[:, None], (chosen_T * here_T)[:, None])
        return d_Tv if also_grad_TK is None else self._add_chosen_gradient(d_Tv, first, also_grad_TK)

    def _add_chosen_gradient(self, d_Tv: Tensor, first: int, also_grad_TK: Tensor) -> Tensor:
        """Add the gradient of x of the further tokens to that of a block, in place."""
        assert self.also_local_TK is not None
        column_TK, here_TK = self._also_places(self.also_local_TK, first, d_Tv.shape[-1])
        return d_Tv.scatter_add_(-1, column_TK, (also_grad_TK / self._temperature * here_TK).to(d_Tv.dtype))

    def _scaled(self, logits_Tv: Tensor, scratch: "Scratch") -> Tensor:
        x_Tv = scratch.first(logits_Tv.shape).copy_(logits_Tv)
        return x_Tv if self._temperature == 1.0 else x_Tv.div_(self._temperature)

    def _also_places(self, local_TK: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
        column_TK = local_TK - first
        is_held_TK = (local_TK >= 0) & (local_TK < self._columns)
        is_here_TK = is_held_TK & (column_TK >= 0) & (column_TK < columns)
        return column_TK.clamp(0, columns - 1), is_here_TK

    def _places(self, first: int, columns: int) -> tuple[Tensor, Tensor]:
        """Return the columns of the targets, clamped into a block, and True where a target is in it."""
        column_T = self.local_T - first
        return column_T.clamp(0, columns - 1), self._mine_T & (column_T >= 0) & (column_T < columns)


class Scratch:
    """Float32 blocks of memory that every block of logits uses in turn; two with entropies, else one."""

    def __init__(self, elements: int, device: torch.device, blocks: int = 2) -> None:
        self._blocks = torch.empty(blocks, elements, dtype=torch.float32, device=device)

    def first(self, shape: torch.Size) -> Tensor:
        return self._blocks[0, : shape.numel()].view(shape)

    def second(self, shape: torch.Size) -> Tensor:
        return self._blocks[1, : shape.numel()].view(shape)
