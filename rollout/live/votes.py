"""Several verdicts on one turn, and the one that they make: the strict plurality. Pure."""

from collections import Counter
from collections.abc import Sequence

from slipstream.rollout.reward.live import Verdict


def elected(votes: Sequence[Verdict]) -> Verdict:
    """Return the score that more votes have than any other, with the longest hint of those votes.

    Votes without a score do not count. The score is None when none has one, and when two lead.
    """
    counts = Counter(vote.score for vote in votes if vote.score is not None).most_common(2)
    if not counts or (len(counts) == 2 and counts[0][1] == counts[1][1]):
        return Verdict(None)
    score = counts[0][0]
    hints = (vote.hint for vote in votes if vote.score == score and vote.hint)
    return Verdict(score, max(hints, key=len, default=None))
