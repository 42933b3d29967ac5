"""Where rollout functions get prompts from."""

import copy
import json
from pathlib import Path

from slime.utils.misc import load_function
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample


class DataSource:
    """The methods of a class at ``data_source_path``."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        raise NotImplementedError

    def add_samples(self, samples: list[list[Sample]]):
        raise NotImplementedError

    def save(self, rollout_id):
        raise NotImplementedError

    def load(self, rollout_id=None):
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


class RolloutDataSource(DataSource):
    """The prompts of the recipe, in its order, again and again. It cannot take samples back."""

    def __init__(self, args):
        self.args = args
        self.metadata: dict = {}
        self.sample_group_index = self.sample_index = 0
        self.dataset = self._stream = None
        if args.rollout_global_dataset and args.prompt_data is not None:
            from slipstream.rollout.prompts import PromptSet, PromptStream

            self.dataset = recipe_prompts(args, args.prompt_data)
            prompts = PromptSet.of(self.dataset)
            self._stream = PromptStream(prompts, shuffle=args.rollout_shuffle, seed=args.rollout_seed)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return [self._group() for _ in range(num_samples)]

    def _group(self) -> list[Sample]:
        stream = self._stream
        row = Sample() if stream is None else samples_of(self.args, [stream.at(self.sample_group_index)])[0]
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = copy.deepcopy(row)
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group

    def add_samples(self, samples):
        raise RuntimeError(f"{type(self).__name__} takes no samples back")

    def _state_file(self, folder, rollout_id) -> Path:
        return Path(folder) / "rollout" / f"data_source_{rollout_id}.json"

    def save(self, rollout_id):
        if self.args.rollout_global_dataset:
            path = self._state_file(self.args.save, rollout_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps([self.sample_group_index, self.sample_index, self.metadata]))

    def load(self, rollout_id=None):
        if self.args.rollout_global_dataset and self.args.load is not None:
            path = self._state_file(self.args.load, rollout_id)
            if path.exists():
                self.sample_group_index, self.sample_index, self.metadata = json.loads(path.read_text())

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The prompts of the recipe, after the samples that were given back."""

    def __init__(self, args):
        super().__init__(args)
        self.buffer: list[list[Sample]] = []
        self.buffer_filter = load_function(args.buffer_filter_path) if args.buffer_filter_path else pop_first

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = self.buffer_filter(self.args, None, self.buffer, num_samples) if self.buffer else []
        return groups + super().get_samples(num_samples - len(groups))

    def add_samples(self, samples):
        for group in samples or ():
            if not isinstance(group, list) or len(group) != self.args.n_samples_per_prompt:
                raise AssertionError(f"a group must be a list of {self.args.n_samples_per_prompt} samples")
        self.buffer.extend(samples or ())

    def get_buffer_length(self) -> int:
        return len(self.buffer)


def pop_first(args, rollout_id, buffer, num_samples: int) -> list[list[Sample]]:
    """Take the groups out of the buffer that were given back first."""
    groups = buffer[:num_samples]
    del buffer[:num_samples]
    return groups


def recipe_prompts(args, path: str):
    """Return the prompts of a file, read as the recipe says. Raises PromptError and OSError."""
    from slipstream.configs.schema import ColumnsConfig, PromptFile
    from slipstream.rollout.prompts import StoredPrompts, checked_prompts

    columns = ColumnsConfig(**args.prompt_columns)
    return StoredPrompts(checked_prompts(PromptFile(Path(path), columns, args.prompt_template)))


def samples_of(args, prompts) -> list[Sample]:
    """Return a sample for each row of a prompt set: of ``slipstream.Prompt``."""
    from slipstream.rollout.compat.slime.episode_samples import fields_of

    tokenizer = load_tokenizer(args.hf_checkpoint) if args.apply_chat_template else None
    return [Sample(**fields_of(prompt, args, tokenizer)) for prompt in prompts]
