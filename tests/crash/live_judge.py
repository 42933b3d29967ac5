"""The judge of turns whose run is killed again and again: its scores differ, and nothing else matters."""

from slipstream.rollout.reward.live import JudgedTurn, Verdict
from slipstream.rollout.tokens.trajectory import Messages


class Judge:
    """Likes answers of an even length."""

    async def judge(self, turn: JudgedTurn, next_state: Messages) -> Verdict:
        return Verdict(float(len(turn.text) % 2 == 0))
