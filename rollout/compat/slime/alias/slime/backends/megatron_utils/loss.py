"""What losses begin with: log-probs and entropies of response tokens, from logits."""

from slipstream.backend.trainer.slime.log_probs import get_log_probs_and_entropy

__all__ = ["get_log_probs_and_entropy"]
