"""API keys: hashed, compared without a hint, valid until they are revoked, and never given a second time."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slipstream.rollout.gateway import keys as keys_module
from slipstream.rollout.gateway.keys import ApiKeys, KeysError, add_key, read_keys, revoke_key
from slipstream.rollout.tokens.turn_entries import TurnType
from tests.environment import environment

ROOT = Path(__file__).parents[2]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 2
        return self.now


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(keys_module, "LOOK_S", 60.0)
    return tmp_path / "run" / "keys.json"


def test_there_is_no_key_by_default(path):
    ring = ApiKeys(path)
    assert [ring.user(key) for key in ("", "sk", "None", "sk-slip-", "sk-slip--", "EMPTY")] == [None] * 6


def test_a_key_is_its_holders_with_its_session_and_type_and_no_other_text_is(path):
    ann = add_key(path, "ann")
    bob = add_key(path, "bob", session="s-1", turn_type=TurnType.SIDE)
    ring = ApiKeys(path)
    user = ring.user(bob)
    assert (user.name, user.session, user.turn_type) == ("bob", "s-1", TurnType.SIDE)
    user = ring.user(ann)
    assert (user.name, user.session, user.turn_type) == ("ann", None, TurnType.MAIN)
    id_, secret = ann.removeprefix("sk-slip-").split("-", 1)
    other = bob.removeprefix("sk-slip-").split("-", 1)[1]
    for wrong in (
        ann[:-1],
        ann + "x",
        f"sk-slip-{id_}-{other}",
        secret,
        id_,
        ann.upper(),
        f" {ann}",
        "\ud800",
    ):
        assert ring.user(wrong) is None


def test_the_file_has_no_secret_and_is_its_owners_alone(path):
    key = add_key(path, "ann")
    assert key.split("-", 3)[3] not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(key.split("-", 3)[3]) == 43, "256 bits"


def test_a_running_gateway_follows_the_file(path):
    ring = ApiKeys(path, clock=Clock())
    ann = add_key(path, "ann")
    assert ring.user(ann).name == "ann"
    revoke_key(path, "ann")
    assert ring.user(ann) is None
    bob = add_key(path, "bob")
    assert ring.user(bob).name == "bob"
    content = path.read_bytes()
    path.write_text("{")
    assert ring.user(bob) is None, "a file that cannot be read lets nobody in"
    path.write_bytes(content)
    assert ring.user(bob).name == "bob"
    path.unlink()
    assert ring.user(bob) is None


def test_the_file_is_not_read_for_every_request(path, monkeypatch):
    ann = add_key(path, "ann")
    ring = ApiKeys(path, clock=lambda: 0.0)
    monkeypatch.setattr(keys_module, "read_keys", lambda path: pytest.fail("read"))
    assert ring.user(ann).name == "ann"


def test_a_disk_that_stalls_lets_in_those_whose_keys_are_known(path, monkeypatch):
    ann = add_key(path, "ann")
    ring = ApiKeys(path, clock=Clock())
    answers, stamp, looks = threading.Event(), keys_module._stamp, []

    def late(path: Path):
        looks.append(path)
        answers.wait(60)
        return stamp(path)

    monkeypatch.setattr(keys_module, "_stamp", late)
    monkeypatch.setattr(keys_module, "LOOK_S", 0.01)
    revoke_key(path, "ann")
    assert [ring.user(ann).name for _ in range(3)] == ["ann"] * 3
    assert len(looks) == 1, "one look waits, and no further one is begun"
    answers.set()
    ring._looking.join(60)
    assert ring.user(ann) is None


def test_a_name_is_never_given_again(path):
    add_key(path, "ann")
    with pytest.raises(KeysError, match="choose another name"):
        add_key(path, "ann")
    revoke_key(path, "ann")
    with pytest.raises(KeysError, match="has, or had, a key"):
        add_key(path, "ann")
    with pytest.raises(KeysError, match="no valid key of the name 'ann'; it has: none"):
        revoke_key(path, "ann")
    assert [(key.name, key.hash, bool(key.revoked)) for key in read_keys(path)] == [("ann", "", True)]


def test_a_key_is_made_for_no_session_that_could_not_be_named(path):
    with pytest.raises(KeysError, match="--session names the session 'größer'"):
        add_key(path, "ann", session="größer")
    key = add_key(path, "ann", session=" s ")
    assert ApiKeys(path).user(key).session == "s"


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "ann\n", "environment", "é"])
def test_a_name_that_cannot_be_one_is_refused(path, name):
    with pytest.raises(KeysError, match="name"):
        add_key(path, name)
    assert not path.exists()


def test_a_key_of_the_environment_counts_beside_those_of_the_file(path):
    ann = add_key(path, "ann")
    ring = ApiKeys(path, environment="plain secret")
    assert ring.user("plain secret").name == "environment"
    assert ring.user(ann).name == "ann"
    assert ring.user("plain secret ") is None


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 1}', '{"format": 2, "keys": []}', '{"format": "x"}']
)
def test_a_damaged_file_is_refused(path, content):
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(KeysError, match=r"keys.json (is no file of API keys|has the format 2)"):
        ApiKeys(path)


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "slipstream.backend.cli", "key", *arguments],
        cwd=ROOT,
        env=environment(NO_COLOR="1"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_commands_add_list_and_revoke(path):
    added = command("add", str(path), "ann", "--session", "s-1", "--side")
    assert added.returncode == 0, added.stderr
    key = added.stdout.strip()
    user = ApiKeys(path).user(key)
    assert (user.name, user.session, user.turn_type) == ("ann", "s-1", TurnType.SIDE)
    listed = command("list", str(path), "--json")
    (entry,) = json.loads(listed.stdout)
    assert (entry["name"], entry["session"], entry["revoked"]) == ("ann", "s-1", None)
    assert "hash" not in entry
    assert command("revoke", str(path), "ann").returncode == 0
    assert ApiKeys(path).user(key) is None
    again = command("revoke", str(path), "ann")
    assert (again.returncode, again.stdout) == (2, "")
    assert "no valid key of the name 'ann'" in again.stderr
