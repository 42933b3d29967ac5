"""Which tokens of a chat its assistant has written."""

from slipstream.rollout.compat.slime.chat_masks import MultiTurnLossMaskGenerator, get_response_lengths

__all__ = ["MultiTurnLossMaskGenerator", "get_response_lengths"]
