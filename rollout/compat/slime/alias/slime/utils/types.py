"""``Sample``: what a slime hook is given, fills in and returns."""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar


def _plain(values, kind) -> list:
    """Return a sequence, an array or a tensor as a flat list of ``kind``."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    if hasattr(values, "reshape"):
        values = values.reshape(-1).tolist()
    return [kind(value) for value in values]


class _Counters:
    """A dataclass of counters that meta_info of a reply adds to."""

    _SOURCES: ClassVar[dict[str, str]]
    """Key in meta_info of each counter."""

    def add(self, meta_info: dict) -> None:
        for name, key in self._SOURCES.items():
            setattr(self, name, getattr(self, name) + meta_info.get(key, 0))

    def to_dict(self) -> dict:
        return {name: getattr(self, name) for name in self._SOURCES}

    @classmethod
    def from_dict(cls, data: dict):
        return cls(**{name: data.get(name, 0) for name in cls._SOURCES})


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


@dataclass
class Sample:
    """One trajectory, from its prompt to its reward.

    ``loss_mask`` and ``rollout_log_probs`` cover the response tokens only: the last ``response_length`` of
    ``tokens``. A hook may set attributes beyond the fields; ``to_dict`` and ``from_dict`` keep them.
    """

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    @dataclass
    class SpecInfo(_Counters):
        _SOURCES: ClassVar[dict[str, str]] = {
            "spec_accept_token_num": "spec_accept_token_num",
            "spec_draft_token_num": "spec_draft_token_num",
            "spec_verify_ct": "spec_verify_ct",
            "completion_token_num": "completion_tokens",
        }
        spec_accept_token_num: int = 0
        spec_draft_token_num: int = 0
        spec_verify_ct: int = 0
        completion_token_num: int = 0

        @property
        def spec_accept_rate(self) -> float:
            return _share(self.spec_accept_token_num, self.spec_draft_token_num)

        @property
        def spec_accept_length(self) -> float:
            return _share(self.completion_token_num, self.spec_verify_ct)

    @dataclass
    class PrefixCacheInfo(_Counters):
        _SOURCES: ClassVar[dict[str, str]] = {
            "cached_tokens": "cached_tokens",
            "total_prompt_tokens": "prompt_tokens",
        }
        cached_tokens: int = 0
        total_prompt_tokens: int = 0

        @property
        def prefix_cache_hit_rate(self) -> float:
            return _share(self.cached_tokens, self.total_prompt_tokens)

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None  # siblings of one episode share it; None: the index
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def to_dict(self) -> dict:
        """Return all attributes as plain data, those beyond the fields included."""
        return {
            **vars(self),
            "status": self.status.value,
            "spec_info": self.spec_info.to_dict(),
            "prefix_cache_info": self.prefix_cache_info.to_dict(),
        }

    @staticmethod
    def from_dict(data: dict) -> "Sample":
        """Return the sample that ``to_dict`` has described. Unknown keys become attributes."""
        values = {
            **data,
            "status": Sample.Status(data["status"]),
            "spec_info": Sample.SpecInfo.from_dict(data.get("spec_info", {})),
            "prefix_cache_info": Sample.PrefixCacheInfo.from_dict(data.get("prefix_cache_info", {})),
        }
        known = {entry.name for entry in fields(Sample)}
        sample = Sample(**{name: value for name, value in values.items() if name in known})
        for name in values.keys() - known:
            setattr(sample, name, values[name])
        return sample

    def get_reward_value(self, args) -> float:
        return self.reward[args.reward_key] if args.reward_key else self.reward

    @property
    def effective_response_length(self) -> int:
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self,
        args=None,
        *,
        tokens=None,
        log_probs=None,
        trainable: bool = True,
        meta_info: dict | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens of the response, and everything that covers the response, consistently.

        Sampled tokens need their log-probs; tokens of tools and environments must not have any. ``meta_info``
        is the engine's: it sets the status, and appends the weight version. Nuclei of top-p sampling and
        routed experts are not in it: recipes sample with `top_p: 1` and replay no routes. Raises ValueError.
        """
        ids = [] if tokens is None else _plain(tokens, int)
        values = None if log_probs is None else _plain(log_probs, float)
        values = self._checked_log_probs(ids, values, trainable)
        if text is not None:
            self.response += text
        before = self.response_length
        if ids:
            self.tokens += ids
            self.response_length += len(ids)
            if self.loss_mask is None:
                self.loss_mask = [1] * before
            self.loss_mask += [int(trainable)] * len(ids)  # in place: hooks hold the list
        if values is not None:
            self._append_log_probs(values, trainable, before)
        if update_terminal_info and "finish_reason" in (meta_info or {}):
            self._end_reply(args, meta_info)
        if self.loss_mask is not None and len(self.loss_mask) != self.response_length:
            raise ValueError(
                f"loss_mask length {len(self.loss_mask)} != response_length {self.response_length}"
            )

    @staticmethod
    def _checked_log_probs(ids: list[int], values: list[float] | None, trainable: bool) -> list[float] | None:
        if values is not None and len(values) != len(ids):
            raise ValueError(f"log_probs length {len(values)} != tokens length {len(ids)}")
        if ids and trainable and values is None:
            raise ValueError("trainable response tokens require rollout log probabilities.")
        if ids and not trainable:
            if values is not None:
                raise ValueError("non-trainable response tokens should not pass rollout log probabilities.")
            return [0.0] * len(ids)
        return values

    def _append_log_probs(self, values: list[float], trainable: bool, before: int) -> None:
        if self.rollout_log_probs is None:
            if trainable and before:
                raise ValueError(
                    f"rollout_log_probs of the {before} response tokens so far are missing: trainable tokens "
                    "cannot follow on them"
                )
            self.rollout_log_probs = [0.0] * before
        self.rollout_log_probs += values

    def _end_reply(self, args, meta_info: dict) -> None:
        if getattr(args, "sglang_speculative_algorithm", False):
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        statuses = {
            "length": Sample.Status.TRUNCATED,
            "abort": Sample.Status.ABORTED,
            "stop": Sample.Status.COMPLETED,
        }
        self.status = statuses.get(meta_info["finish_reason"]["type"], self.status)
