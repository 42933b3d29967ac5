"""The reward that compares the text behind a marker with the label."""

from slipstream.rollout.tokens.trajectory import Finish, Prompt, Trajectory


class FinalAnswer:
    """1.0 for a response that ends by itself, with the label behind its only ``marker``; 0.0 otherwise.

    White space around the label is ignored on both sides.
    """

    is_accuracy = True

    def __init__(self, marker: str = "#") -> None:
        if not marker:
            raise ValueError("marker must not be empty")
        self._marker = marker

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ValueError for a prompt without a label."""
        if prompt.label is None:
            raise ValueError(f"{prompt.reference} has no label to compare with")

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        self.check_prompt(prompt)
        _, marker, answer = response.partition(self._marker)
        well_formed = marker != "" and self._marker not in answer and trajectory.finish is Finish.STOP
        return float(well_formed and answer.strip() == str(prompt.label).strip())
