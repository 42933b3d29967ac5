"""A data source gives prompts from a process of its own, and they are on disk before they are used."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.configs.schema import RunConfig
from slipstream.rollout.collection.driver.gate import AdmissionGate
from slipstream.rollout.collection.driver.group_ledger import NoLedger
from slipstream.rollout.collection.driver.intake import Intake
from slipstream.rollout.compat.slime import make_slime_importable
from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.data_source_process import slime_drawing
from slipstream.rollout.compat.slime.episode_samples import drawn_onto, fields_of, is_done
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.prompts.sources.drawn_prompts import FILE, GIVEN_BACK, DrawnPrompts
from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.system.programs.hook_process import HookProcessFailed
from slipstream.rollout.tokens.trajectory import Prompt
from tests.unit.doubles import Listener

SAMPLES = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(folder)
    return folder


def config(model: Path, root: Path, name: str, timeout_s: float = 60) -> RunConfig:
    (root / "run").mkdir(exist_ok=True)
    return RunConfig.model_validate(
        {
            "run": {"name": "run", "root": str(root), "steps": 1},
            "model": {"path": str(model)},
            "data": {"path": "unused.jsonl"},
            "rollout": {
                "max_head_offpolicyness": 4,
                "batch_size": 2,
                "n_samples_per_prompt": SAMPLES,
                "hooks": {
                    "data_source": f"tests.unit.slime_data_sources.{name}",
                    "batch_timeout_s": timeout_s,
                },
            },
        }
    )


async def drawing(
    model: Path,
    root: Path,
    name: str,
    *,
    until: int,
    take: int = 0,
    lost: Sequence[tuple[int, Loss]] = (),
    notes: list[str] | None = None,
    **more,
) -> DrawnPrompts:
    """Draw until so many prompts are there. ``take``: number of prompts that are used first. ``lost``: groups
    that the run then loses.
    """
    settings = config(model, root, name, **more)
    prompts = DrawnPrompts(root / "run" / FILE)
    for _ in range(take):
        prompts.draw()
    drawn = asyncio.Event()
    prompts.when_ready(lambda: drawn.set() if prompts.drawn >= until else None)
    note = (notes if notes is not None else []).append
    source = slime_drawing(settings, prompts, root / "logs", ahead=until - take, note=note)
    for position, loss in lost:
        source.lost(position, prompts.at(position), loss, "", None)
    task = asyncio.create_task(source.run())
    waiting = asyncio.create_task(drawn.wait())
    try:
        async with asyncio.timeout(120):
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        waiting.cancel()
        await asyncio.wait({task, waiting})
        await source.close()
    return prompts


def test_what_was_drawn_is_read_again_and_the_source_goes_on_behind_it(model, tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.rollout.prompts.sources.drawn_prompts.SAVE_EVERY", 3)
    first = asyncio.run(drawing(model, tmp_path, "Counting", until=4))
    assert [first.at(position).prompt for position in range(4)] == ["0+1=", "1+1=", "2+1=", "3+1="]
    assert first.at(2).label == "3" and first.at(2).metadata["number"] == 2

    file = tmp_path / "run" / FILE
    with file.open("ab") as cut_off:
        cut_off.write(b'{"prompt": "half a li')
    second = asyncio.run(drawing(model, tmp_path, "Counting", until=6, take=4))
    assert [second.at(position).prompt for position in range(6)] == [f"{n}+1=" for n in range(6)]
    assert not file.read_bytes().count(b"half")
    assert list((tmp_path / "run").glob("source-*.json")), "its state was saved on the way"
    with pytest.raises(OSError, match="holds 6 groups, expected the one at position 6"):
        second.at(6)


ALL_LOSSES = [(0, Loss.STALE), (1, Loss.SURPLUS), *((2, loss) for loss in Loss if loss not in GIVEN_BACK)]


@pytest.mark.parametrize("save_every", [1000, 2])
def test_a_source_gets_the_groups_back_that_are_given_up_and_no_others(
    model, tmp_path, monkeypatch, save_every
):
    """What it does with them outlives its process, whether or not its state was saved since."""
    monkeypatch.setattr("slipstream.rollout.prompts.sources.drawn_prompts.SAVE_EVERY", save_every)
    notes: list[str] = []
    asyncio.run(drawing(model, tmp_path, "TakesBack", until=4))
    more = {"lost": ALL_LOSSES, "notes": notes}
    second = asyncio.run(drawing(model, tmp_path, "TakesBack", until=6, take=4, **more))
    again = [second.at(position) for position in (4, 5)]
    assert [(each.prompt, each.label, each.metadata["was"]) for each in again] == [
        ("0+1=", "1", 0),
        ("1+1=", "2", 1),
    ]
    third = asyncio.run(drawing(model, tmp_path, "TakesBack", until=7, take=6))
    assert third.at(6).prompt == "4+1=" and not notes
    assert (tmp_path / "run" / FILE).read_text().count("given_back") == 2


def test_a_source_that_takes_no_group_back_goes_on_and_the_user_hears_of_it(model, tmp_path):
    notes: list[str] = []
    asyncio.run(drawing(model, tmp_path, "Counting", until=2))
    lost = [(0, Loss.STALE), (1, Loss.STALE)]
    second = asyncio.run(drawing(model, tmp_path, "Counting", until=4, take=2, lost=lost, notes=notes))
    assert [second.at(position).prompt for position in range(4)] == [f"{n}+1=" for n in range(4)]
    [note] = notes
    assert "Counting) gets no group back: its add_samples has raised NotImplementedError" in note


def test_a_position_that_the_ledger_knows_and_the_file_does_not_is_an_error(tmp_path):
    (tmp_path / "run").mkdir()
    prompts = DrawnPrompts(tmp_path / "run" / FILE)
    prompts.go_to(5)
    assert not prompts.is_ready
    with pytest.raises(OSError, match="has lost groups"):
        prompts.at(2)


def test_no_group_is_admitted_before_its_prompt_is_there(tmp_path):
    prompts = DrawnPrompts(tmp_path / FILE)
    gate = AdmissionGate(RolloutControl(1, 1), Intake(prompts), NoLedger(), Listener())
    prompts.when_ready(gate.notify)

    async def check() -> None:
        await gate.changed()  # what was there at the beginning
        assert not gate.may_admit()
        waiting = asyncio.create_task(gate.changed())
        await prompts.add([b'{"prompt": "a"}'])
        async with asyncio.timeout(60):
            await waiting
        assert gate.may_admit()
        assert gate.admit()[1] == Prompt(0, "a", None, {})
        assert not gate.may_admit()

    asyncio.run(check())


def test_samples_keep_what_the_source_has_put_on_them(model, tmp_path):
    make_slime_importable()
    prompts = asyncio.run(drawing(model, tmp_path, "WithAnswers", until=1))
    prompt = prompts.at(0)
    sample_type = resolve("slime.utils.types.Sample")
    args = SlimeArguments(apply_chat_template=True, apply_chat_template_kwargs={})
    samples = []
    for number in range(SAMPLES):
        fields = fields_of(prompt, args, None)  # pyright: ignore
        assert fields["prompt"] == "0+1=", "the source has rendered it"
        assert fields["metadata"] == {"number": 0}
        samples.append(drawn_onto(sample_type(**fields), prompt, number))
    assert [sample.tokens for sample in samples] == [[1, 2, 3], [1, 2, 4]]
    assert all(is_done(sample) and sample.teacher == "somebody" for sample in samples)


@pytest.mark.parametrize(
    ("name", "message", "timeout_s"),
    [
        ("Empty", "returned an empty list, expected a list of groups", 60),
        ("Uneven", r"a group of 1 \(Sample\), expected 2 samples", 60),
        ("Mixed", "several prompts or labels", 60),
        ("Secret", "cannot be written down", 60),
        ("Raising", "has raised KeyError: 'answer_idx'", 60),
        ("Hanging", r"has not returned within 0.5 s \(rollout.hooks.batch_timeout_s\)", 0.5),
    ],
)
def test_a_source_that_breaks_its_contract_is_named(model, tmp_path, name, message, timeout_s):
    with pytest.raises(HookProcessFailed, match=message) as raised:
        asyncio.run(drawing(model, tmp_path, name, until=1, timeout_s=timeout_s))
    assert f"rollout.hooks.data_source (tests.unit.slime_data_sources.{name})" in str(raised.value)
