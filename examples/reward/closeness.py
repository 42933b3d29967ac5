"""A reward between 0 and 1: how close the last number of a response is to the label."""

import re

from slipstream import Prompt, Trajectory


class Closeness:
    is_accuracy = False

    def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> dict[str, float]:
        numbers = re.findall(r"\d+", response)
        gap = abs(int(numbers[-1]) - int(prompt.label)) if numbers else 10
        return {"reward": 1 / (1 + gap), "has_number": float(bool(numbers))}
