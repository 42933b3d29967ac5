"""The process in which a recipe's data source lives. Started by ``slime_drawing``.

first request   SourceSetup ──► {"ready": true}
the others      draw ──► {"value": groups, each as a row of the file of drawn prompts}
                save ──► {"value": null}
                give_back ──► {"value": null, or what add_samples has raised}
"""

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec

from slipstream.configs.schema import RunConfig
from slipstream.rollout.compat.slime import make_slime_importable
from slipstream.rollout.compat.slime.arguments import slime_arguments
from slipstream.rollout.compat.slime.episode_samples import DRAWN, drawn_onto, metadata_of
from slipstream.rollout.prompts.sources.drawn_prompts import Drawing, DrawnPrompts, GivenBack, SourceRequest
from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.system.programs.hook_process import LOG, HookProcess, WrongAnswer, serve_answers
from slipstream.rollout.tokens.trajectory import Prompt

SERVE = "slipstream.rollout.compat.slime.data_source_process.serve"

CHUNK = 1000
"""Groups that are skipped at one time."""

OF_PROMPTS = frozenset({"prompt", "label", "metadata"})
OF_EPISODES = frozenset({"index", "group_index", "rollout_id", "session_id"})
"""Fields of samples that are numbered anew."""


class SourceSetup(msgspec.Struct, array_like=True, frozen=True):
    """Setup of the process."""

    config: bytes
    """The recipe as JSON."""
    path: str
    """Import path of the class."""
    saved: int | None
    """Number under which its state was saved last; None: never."""
    behind: list[int | GivenBack]
    """Events since that state, in order: numbers of groups that were drawn, which the run has already, and
    groups that were given back."""


class Source:
    """The data source, and how much it has given."""

    def __init__(self, setup: SourceSetup) -> None:
        """Raises whatever user code raises."""
        make_slime_importable()
        args = slime_arguments(RunConfig.model_validate_json(setup.config))
        self._episodes = cast("int", args.n_samples_per_prompt)
        self._kind: type = resolve("slime.utils.types.Sample")
        self._source: Any = resolve(setup.path)(args)
        if setup.saved is not None:
            self._source.load(setup.saved)
        for event in setup.behind:
            if isinstance(event, GivenBack):
                self._give_back(event)
                continue
            for start in range(0, event, CHUNK):
                self._source.get_samples(min(CHUNK, event - start))

    def answer(self, request: SourceRequest) -> object:
        """Draw, save or give back. Raises WrongAnswer, and whatever user code raises."""
        if request.save is not None:
            return self._source.save(request.save)
        if request.give_back is not None:
            return self._give_back(request.give_back)
        returned: object = self._source.get_samples(request.draw)
        groups = cast("list[object]", returned if isinstance(returned, list) else [])
        if not groups:
            found = "an empty list" if isinstance(returned, list) else type(returned).__name__
            raise WrongAnswer(f"get_samples({request.draw}) returned {found}, expected a list of groups")
        return [self._row(group) for group in groups]

    def _give_back(self, group: GivenBack) -> str | None:
        """Give a group back, as slime does when it aborts one. Return what the source has raised."""
        prompt = Prompt(group.position, group.prompt, group.label, group.metadata)
        samples: list[object] = []
        for number in range(self._episodes):
            sample: Any = self._kind(prompt=group.prompt, label=group.label, metadata=metadata_of(prompt))
            drawn_onto(sample, prompt, number)
            sample.group_index, sample.index = group.position, group.position * self._episodes + number
            sample.status = type(sample.status)("aborted")
            samples.append(sample)
        try:
            self._source.add_samples([samples])
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
        return None

    def _row(self, group: object) -> dict[str, object]:
        """Return a group as it is written down. Raises WrongAnswer."""
        samples = cast("list[Any]", group if isinstance(group, list) else [group])
        if len(samples) != self._episodes or not all(isinstance(each, self._kind) for each in samples):
            kinds = ", ".join(sorted({type(each).__name__ for each in samples}))
            raise WrongAnswer(
                f"get_samples returned a group of {len(samples)} ({kinds}), expected {self._episodes} "
                "samples (rollout.n_samples_per_prompt)"
            )
        first = samples[0]
        if any((each.prompt, each.label) != (first.prompt, first.label) for each in samples):
            raise WrongAnswer("get_samples returned a group with several prompts or labels, expected one")
        others = [self._others(each) for each in samples]
        if all(each == others[0] for each in others):
            others = others[:1]
        row: dict[str, object] = {
            "prompt": first.prompt,
            "label": first.label,
            "metadata": cast("dict[str, object]", first.metadata or {}) | {DRAWN: others},
        }
        try:
            json.dumps(row)
        except (TypeError, ValueError) as error:
            raise WrongAnswer(f"get_samples returned a sample that cannot be written down: {error}") from None
        return row

    def _others(self, sample: Any) -> dict[str, object]:
        """Return what a sample holds besides its prompt: whatever differs from a new sample."""
        defaults = self._kind().to_dict()
        return {
            name: value
            for name, value in sample.to_dict().items()
            if name not in OF_PROMPTS | OF_EPISODES and (name not in defaults or value != defaults[name])
        }


def slime_drawing(
    config: RunConfig, prompts: DrawnPrompts, logs: Path, *, ahead: int, note: Callable[[str], None]
) -> Drawing:
    """Return the drawing from ``rollout.hooks.data_source``. ``ahead``, ``note``: as of ``Drawing``."""
    hooks = config.rollout.hooks
    assert hooks is not None
    assert hooks.data_source is not None
    setup = SourceSetup(config.model_dump_json().encode(), hooks.data_source, prompts.saved, prompts.behind())
    batch = max(1, config.rollout.batch_size)
    return Drawing(
        HookProcess(SERVE, msgspec.msgpack.encode(setup), logs / LOG),
        prompts,
        ahead=ahead,
        named=f"rollout.hooks.data_source ({hooks.data_source})",
        timeout_s=hooks.batch_timeout_s,
        limit="rollout.hooks.batch_timeout_s",
        save_number=lambda drawn: drawn // batch,
        note=note,
    )


def serve(descriptor: int) -> None:
    """Run the process: answer the owner's requests until it closes the connection."""

    def make(request: bytes) -> Callable[[bytes], object]:
        source = Source(msgspec.msgpack.decode(request, type=SourceSetup))
        return lambda request: source.answer(msgspec.msgpack.decode(request, type=SourceRequest))

    serve_answers(descriptor, make)
