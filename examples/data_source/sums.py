"""Endless running sums. A prompt depends on its position alone, so that a resumed run goes on exactly."""

import random


class Sums:
    def __init__(self, seed: int = 0, operands: int = 4) -> None:
        self.seed, self.operands = seed, operands

    def prompts(self, start: int, count: int) -> list[dict[str, object]]:
        return [self._prompt(position) for position in range(start, start + count)]

    def _prompt(self, position: int) -> dict[str, object]:
        digits = random.Random(f"{self.seed} {position}").choices(range(10), k=self.operands)
        text = "".join(f"{tag}{digit}" for tag, digit in zip("abcdefghij", digits, strict=False))
        return {"prompt": text, "label": str(sum(digits) % 10), "operands": self.operands}
