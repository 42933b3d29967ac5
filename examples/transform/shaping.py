"""Two changes of a batch: rewards within bounds, and no response twice in a group."""

from slipstream import TrainBatch


class BoundRewards:
    def __init__(self, low: float = 0.0, high: float = 1.0) -> None:
        self.low, self.high = low, high

    def transform(self, batch: TrainBatch) -> TrainBatch:
        rewards = [each.reward for each in batch.trajectories]
        return batch.rewarded([None if r is None else min(max(r, self.low), self.high) for r in rewards])


class DropRepeated:
    """Keeps the first of several equal responses to one prompt, and always `at_least` trajectories."""

    def __init__(self, at_least: int = 8) -> None:
        self.at_least = at_least

    def transform(self, batch: TrainBatch) -> TrainBatch:
        first: dict[tuple[int, bytes], int] = {}
        for place, each in enumerate(batch.trajectories):
            response = each.tokens_T[each.loss_mask_T].tobytes()
            first.setdefault((int(batch.group_N[place]), response), place)
        kept = sorted(first.values())
        repeated = [place for place in range(len(batch.trajectories)) if place not in first.values()]
        kept += repeated[: max(0, self.at_least - len(kept))]
        return batch.keeping(sorted(kept))
