"""Multiple choice, as in GPQA."""

from slipstream.rollout.compat.slime.multiple_choice import DEFAULT_VALID_LETTERS, compute_gpqa_reward
from slipstream.rollout.compat.slime.multiple_choice import chosen_letter as _extract_letter_from_response

__all__ = ["DEFAULT_VALID_LETTERS", "_extract_letter_from_response", "compute_gpqa_reward"]
