"""``slipstream audit`` of a run of live users: what it prints."""

import io
import json

from rich.console import Console

from slipstream.backend.commands.audit import hints_as_json, print_audit
from slipstream.rollout.ledger.audit.account import Audit
from slipstream.rollout.reward.live import Verdict
from tests.unit.test_live_turns import Run, Talk, in_run, number

__all__ = ["in_run"]


def printed(audit: Audit) -> str:
    stream = io.StringIO()
    print_audit(audit, Console(file=stream, width=100))
    return stream.getvalue()


def test_a_run_without_prompts_shows_its_turns_and_no_empty_table_of_groups():
    tokens = {"trained": 9, "masked": 0, "discarded": 0}
    assert "groups" not in printed(Audit(turns={"trained": 3, "side": 4}, tokens=tokens))
    assert "turns" not in printed(Audit(tokens=tokens))
    mixed = printed(Audit(groups={"trained": 2}, turns={"trained": 3}, tokens=tokens))
    assert "groups" in mixed and "turns" in mixed


def test_hints_are_printed_with_their_turns(in_run):
    talk = Talk()
    talk.say()
    talk.say(parent=1)

    async def act(run: Run):
        await run.hear(talk)
        run.live.verdicts.take(number(1), Verdict(-1.0, "größer"))
        run.live.verdicts.take(number(3), Verdict(1.0))

    in_run(act)
    [line] = hints_as_json(in_run.folder)
    assert json.loads(line) == {
        "gateway": "gateway",
        "entry": 1,
        "state": "ready",
        "score": -1.0,
        "hint": "größer",
    }
