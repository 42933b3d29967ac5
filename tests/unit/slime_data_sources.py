"""Data sources as users of slime write them, for ``test_slime_data_source``."""

import json
import time
from pathlib import Path

from slime.rollout.data_source import DataSource
from slime.utils.types import Sample


class Counting(DataSource):
    """Prompts with ascending numbers."""

    def __init__(self, args):
        self.args = args
        self.next = 0

    def group(self):
        sample = Sample(prompt=f"{self.next}+1=", label=str(self.next + 1), metadata={"number": self.next})
        self.next += 1
        return [Sample.from_dict(sample.to_dict()) for _ in range(self.args.n_samples_per_prompt)]

    def get_samples(self, num_samples):
        return [self.group() for _ in range(num_samples)]

    def add_samples(self, samples):
        raise NotImplementedError

    def _file(self, rollout_id):
        return Path(self.args.save) / f"source-{rollout_id}.json"

    def save(self, rollout_id):
        self._file(rollout_id).write_text(json.dumps(self.next))

    def load(self, rollout_id=None):
        self.next = json.loads(self._file(rollout_id).read_text())

    def __len__(self):
        return 1_000_000


class WithAnswers(Counting):
    """Samples that have responses of their own, each another one, and something else on them."""

    def group(self):
        samples = super().group()
        for number, sample in enumerate(samples):
            sample.tokens = [1, 2, 3 + number]
            sample.response_length = 1
            sample.rollout_log_probs = [-0.5]
            sample.weight_versions = ["0"]
            sample.status = Sample.Status.COMPLETED
            sample.teacher = "somebody"
        return samples


class Empty(Counting):
    def get_samples(self, num_samples):
        return []


class TakesBack(Counting):
    """Gives what it gets back before anything else."""

    def __init__(self, args):
        super().__init__(args)
        self.back = []

    def add_samples(self, samples):
        assert all(sample.status is Sample.Status.ABORTED for group in samples for sample in group)
        assert all(len(group) == self.args.n_samples_per_prompt for group in samples)
        self.back += [
            [sample.prompt, sample.label, sample.metadata["number"], sample.group_index]
            for sample, *_ in samples
        ]

    def group(self):
        if not self.back:
            return super().group()
        prompt, label, number, position = self.back.pop(0)
        metadata = {"number": number, "was": position}
        return [
            Sample(prompt=prompt, label=label, metadata=dict(metadata))
            for _ in range(self.args.n_samples_per_prompt)
        ]

    def save(self, rollout_id):
        self._file(rollout_id).write_text(json.dumps([self.next, self.back]))

    def load(self, rollout_id=None):
        self.next, self.back = json.loads(self._file(rollout_id).read_text())


class Uneven(Counting):
    def group(self):
        return super().group()[:1]


class Mixed(Counting):
    def group(self):
        samples = super().group()
        samples[0].prompt = "another one"
        return samples


class Secret(Counting):
    def group(self):
        samples = super().group()
        for sample in samples:
            sample.metadata = {"secret": object()}
        return samples


class Raising(Counting):
    def get_samples(self, num_samples):
        raise KeyError("answer_idx")


class Hanging(Counting):
    def get_samples(self, num_samples):
        time.sleep(600)
