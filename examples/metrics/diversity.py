"""The share of responses that no other response to the same prompt equals, and how long good ones are."""

from collections import Counter
from collections.abc import Mapping

from slipstream import TrainBatch


class Diversity:
    def metrics(self, batch: TrainBatch, trained: Mapping[str, float]) -> dict[str, float]:
        responses = [
            (int(group), each.tokens_T[each.loss_mask_T].tobytes())
            for group, each in zip(batch.group_N, batch.trajectories, strict=True)
        ]
        counts = Counter(responses)
        found = {"distinct_fraction": sum(counts[each] == 1 for each in responses) / len(responses)}
        lengths = [each.response_length for each in batch.trajectories if (each.reward or 0) > 0]
        if lengths:
            found["good_length"] = sum(lengths) / len(lengths)
        return found
