"""From a run folder to where the run goes on: what is used, what is given up, what is refused."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.backend.checkpoint.folder import CHECKPOINTS, CheckpointFolder
from slipstream.backend.checkpoint.manifest import CheckpointRecord, record_digest
from slipstream.backend.driver.start.inputs import InputError
from slipstream.backend.driver.start.resume import (
    begin,
    find_checkpoint,
)
from slipstream.backend.driver.start.run_folder import (
    check_same_run,
    recipe_text,
    refuse_without_ledger,
)
from slipstream.configs.schema import DataConfig, RunConfig
from slipstream.rollout.control.core import Ticket
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.ledger.recovery import open_ledger
from slipstream.rollout.ledger.writing.transaction import Training
from slipstream.rollout.ledger.writing.writer import SAMPLES, Ledger
from slipstream.rollout.prompts import PromptSet
from slipstream.rollout.tokens.record import (
    REF,
    PieceHeader,
    checksum,
    decode_chunks,
    decode_piece,
    encode,
    encode_chunk,
)
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Prompt, TrajectoryHeader

PROMPTS = [Prompt(i, f"prompt {i}") for i in range(20)]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = RunConfig.model_validate(
        {
            "run": {"name": "run", "root": str(tmp_path), "steps": 20},
            "model": {"path": "model"},
            "data": {"path": "train.jsonl", "shuffle": False},
            "rollout": {
                "max_head_offpolicyness": 2,
                "batch_size": 1,
                "n_samples_per_prompt": 1,
                "reward": "slipstream.rollout.reward.FinalAnswer",
            },
        }
    )
    config.run.folder.mkdir()
    (config.run.folder / "recipe.yaml").write_text(recipe_text(config))
    return config


def start(config: RunConfig, checkpoint=None, other_prompts: bool = False):
    inputs, lease = SimpleNamespace(prompts=PromptSet.of(PROMPTS)), SimpleNamespace(check=lambda: None)
    return begin(config, inputs, checkpoint, lease, other_prompts=other_prompts)  # type: ignore[arg-type]


def stored(ledger: Ledger, context: tuple[int, ...], tokens: tuple[int, ...]) -> bytes:
    """Append a chunk, and return the reference to it."""
    chunk = encode_chunk(context, tokens, [-0.5] * len(tokens))
    return REF.pack(*ledger.append(chunk), len(chunk), checksum(chunk))


def ready(ledger: Ledger, id_: int, version: int) -> None:
    """Group ``id_`` is admitted, generated and judged at ``version``."""
    ledger.admitted(Ticket(id_, version), id_)
    header = TrajectoryHeader(((UNSAMPLED, False, 1), (version, True, 3)), Finish.STOP, 0, 1.0)
    ledger.judged(id_ * SAMPLES, stored(ledger, (1,), (2, 3)), encode(header))
    ledger.ready(id_, 2)


async def trained(ledger: Ledger, id_: int, version: int) -> None:
    """Group ``id_``, of the version before, is what ``version`` was trained on."""
    ready(ledger, id_, version - 1)
    ledger.step_begins(version, version - 1, [id_])
    ledger.published(version, [Training(id_, 0, 2, 0, 2, ((version - 1, 2),))])
    await ledger.flushed()


def checkpoint(config: RunConfig, version: int, step: int, ledger: Ledger | None = None) -> None:
    folder = CheckpointFolder(config.run.folder / CHECKPOINTS, keep_last=9)
    (folder.begin(version) / "weights").write_bytes(b"1")
    watermark = ledger.watermark() if ledger is not None else None
    record = CheckpointRecord(version, step, 0, step, {"trained": step}, watermark)
    folder.commit(record)
    if ledger is not None:
        ledger.checkpointed(version, record_digest(record))


def test_a_run_goes_on_from_its_checkpoint_with_what_the_ledger_kept(config: RunConfig):
    ledger = start(config).ledger

    async def first_life() -> None:
        await trained(ledger, 0, 1)
        checkpoint(config, 1, 1, ledger)
        await trained(ledger, 1, 2)
        ledger.admitted(Ticket(2, 2), 2)
        piece = PieceHeader(0, b"digest", ((2, 2),))
        ledger.piece(2 * SAMPLES, 0, stored(ledger, (1,), (2, 3)), encode(piece))
        ledger.admitted(Ticket(3, 2), 3)
        await ledger.flushed()

    asyncio.run(first_life())
    ledger.close()
    state = start(config, find_checkpoint(config))
    try:
        # A version keeps its name, and the next one has a number that was never begun.
        assert (state.control.version, state.control.step) == (1, 1)
        assert state.control.versions.next == 3
        assert state.notes == [
            "resumed from version 1 (step 1): 1 groups ready, 1 continued, 1 to be generated again"
        ]
        assert state.control.ready == 1  # what was trained into version 2, to be trained again
        assert [group.id for group in state.groups.ready] == [1]
        [continued] = state.groups.continued
        # Version 2 is a child of version 1: its tokens lag by one update.
        assert (continued.id, continued.version, continued.prompt) == (2, 2, PROMPTS[2])
        assert state.control.lag(2) == 1
        [(ref, header)] = continued.samples[0].pieces
        assert decode_piece(header).spans == ((2, 2),)
        assert [chunk.tokens.tolist() for chunk in decode_chunks(state.ledger.read(ref))] == [[2, 3]]
        assert state.intake.position == 4
    finally:
        state.ledger.close()


def test_a_prompt_that_was_requeued_and_not_admitted_again_is_not_forgotten(config: RunConfig):
    """Group 1 has replaced group 0 and is given up, too; group 2 stands for a prompt of its own."""
    ledger = start(config).ledger

    async def first_life() -> None:
        ledger.admitted(Ticket(0, 0), 0)
        ledger.lost(0, Loss.REQUEUED)
        ledger.admitted(Ticket(1, 0, requeued_from=0), 0)
        ledger.lost(1, Loss.REQUEUED)
        ledger.admitted(Ticket(2, 0), 1)
        ledger.lost(2, Loss.STALE)
        await ledger.flushed()

    asyncio.run(first_life())
    ledger.close()
    state = start(config)
    try:
        again, fresh = state.control.admit(), state.control.admit()
        assert again == Ticket(3, 0, requeued_from=1)
        assert (state.intake.position_of(again), state.intake.prompt_of(3)) == (0, PROMPTS[0])
        state.intake.position_of(fresh)
        assert (fresh, state.intake.prompt_of(4)) == (Ticket(4, 0), PROMPTS[2])
    finally:
        state.ledger.close()


def test_with_another_prompt_set_no_group_gets_answers_to_two_prompts(config: RunConfig):
    """A group that is ready is whole; one that has begun would go on with the prompt now at its position."""
    ledger = start(config).ledger

    async def first_life() -> None:
        ready(ledger, 0, 0)
        ledger.admitted(Ticket(1, 0), 1)
        piece = PieceHeader(0, b"digest", ((0, 3),))
        ledger.piece(SAMPLES, 0, stored(ledger, (1,), (2, 3, 4)), encode(piece))
        await ledger.flushed()

    asyncio.run(first_life())
    ledger.close()
    state = start(config, other_prompts=True)
    state.ledger.close()
    assert "1 groups ready, 0 continued, 1 to be generated again" in state.notes[0]
    assert not state.groups.continued


def test_what_cannot_be_trained_within_the_bound_is_generated_again(config: RunConfig):
    ledger = start(config).ledger

    async def first_life() -> None:
        for id_ in range(3):
            ready(ledger, id_, 0)
        await ledger.flushed()

    asyncio.run(first_life())
    ledger.close()
    stricter = config.rollout.model_copy(update={"max_head_offpolicyness": 0})
    state = start(config.model_copy(update={"rollout": stricter}))
    state.ledger.close()
    assert "1 groups ready, 0 continued, 2 to be generated again" in state.notes[0]


def test_a_checkpoint_of_a_line_that_was_left_is_passed_over(config: RunConfig):
    ledger = start(config).ledger

    async def life() -> None:
        for version in (1, 2, 3):
            await trained(ledger, version - 1, version)
            if version != 2:
                checkpoint(config, version, version, ledger)
        await ledger.flushed()

    asyncio.run(life())
    ledger.close()
    # Version 3 is damaged, so the second life goes on from version 1 and leaves 2 and 3 behind.
    ledger, _ = open_ledger(config.run.folder, batch_size=1, n_samples=1, bound=2, restored=1)
    ledger.close()
    found = find_checkpoint(config)
    assert found.record.version == 1
    assert found.warnings == (
        "checkpoint v00000003 is passed over: the run has gone on from an older one since",
    )


def test_two_restarts_from_one_checkpoint_do_not_change_the_distance_of_a_token(config: RunConfig):
    """Its lag is counted along the tree of versions, whatever the versions are called."""
    ledger = start(config).ledger

    async def first_life() -> None:
        await trained(ledger, 0, 1)
        checkpoint(config, 1, 1, ledger)
        await trained(ledger, 1, 2)
        ready(ledger, 2, 2)
        await ledger.flushed()

    asyncio.run(first_life())
    ledger.close()
    for _ in range(3):
        state = start(config, find_checkpoint(config))
        assert (state.control.version, state.control.lag(2)) == (1, 1)
        assert sorted(group.id for group in state.groups.ready) == [1, 2]
        state.ledger.close()


@pytest.mark.parametrize(
    ("section", "setting", "value"),
    [("run", "seed", 7), ("rollout", "batch_size", 2), ("data", "shuffle", True)],
)
def test_settings_that_give_the_ledger_its_meaning_cannot_change(config: RunConfig, section, setting, value):
    check_same_run(config)
    changed = getattr(config, section).model_copy(update={setting: value})
    with pytest.raises(InputError, match=rf"{section}.{setting}: {value}, but the run was started with"):
        check_same_run(config.model_copy(update={section: changed}))


MIXTURE = [{"name": "a", "path": "a.jsonl", "weight": 1}, {"name": "b", "path": "b.jsonl", "weight": 2}]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("columns", {"prompt": "question"}),
        ("prompt_template", "{question}"),
        ("max_prompt_tokens", 9),
        ("sources", [{**MIXTURE[0], "weight": 3}, MIXTURE[1]]),
        ("sources", MIXTURE[::-1]),
    ],
)
def test_what_decides_which_prompt_is_where_in_the_order_cannot_change(config: RunConfig, setting, value):
    def with_data(**data) -> RunConfig:
        settings = DataConfig.model_validate({"sources": MIXTURE, "shuffle": False, **data})
        return config.model_copy(update={"data": settings})

    (config.run.folder / "recipe.yaml").write_text(recipe_text(with_data()))
    moved = [{**each, "path": f"elsewhere/{each['path']}"} for each in MIXTURE]
    check_same_run(with_data(sources=moved))
    with pytest.raises(InputError, match=rf"data\.{setting}: .*, but the run was started with"):
        check_same_run(with_data(**{setting: value}))


def test_all_changed_settings_are_named_at_once(config: RunConfig):
    changed = config.model_copy(
        update={
            "run": config.run.model_copy(update={"seed": 7}),
            "rollout": config.rollout.model_copy(update={"batch_size": 2, "n_samples_per_prompt": 3}),
        }
    )
    with pytest.raises(InputError) as error:
        check_same_run(changed)
    assert all(name in str(error.value) for name in ("run.seed", "batch_size", "n_samples_per_prompt"))


def test_checkpoints_without_a_ledger_are_not_set_aside_unasked(config: RunConfig):
    refuse_without_ledger(config.run.folder)
    checkpoint(config, 1, 1)
    with pytest.raises(InputError, match=r"has checkpoints but no ledger\.sqlite"):
        refuse_without_ledger(config.run.folder)
