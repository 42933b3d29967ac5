"""The groups of engines: an error policy of their own, and private calls of torch that are known."""

import ast
import os
import threading

import pytest
import torch

from slipstream.bridge.group import peers
from slipstream.bridge.group.peers import POLICY, Peers, error_policy
from slipstream.configs.installed.environment import pinned
from slipstream.rollout.engine.patches import digest_of
from tests.environment import ROOT

PATIENCE_S = 120
TORCH = "2.13.0"
"""The release whose private calls were read."""
READ = {
    "_new_process_group_helper": "d9cf93179e901431",
    "destroy_process_group": "5eb8a583a5fad9d5",
    "_abort_process_group": "a72a2937ec5b280b",
    "batch_isend_irecv": "fcb242ec8b1cdadd",
}
"""Functions of ``torch.distributed.distributed_c10d`` by digest: what is called, and what shows how a group
is aborted and destroyed."""
ADVICE = (
    "read in torch's source what has changed in these functions, in the variables that ProcessGroupNCCL.cpp "
    "reads (bridge/group/peers.py: POLICY) and in what its watchdog does after a failure; then write TORCH "
    "and READ anew"
)
PRIVATE = {
    ("bridge/group/peers.py", "_new_process_group_helper"),
    ("bridge/group/peers.py", "_world"),
}


def test_the_pinned_release_of_torch_is_the_one_that_was_read():
    assert pinned("gpu")["torch"] == pinned("cpu")["torch"] == TORCH, ADVICE
    assert torch.__version__.partition("+")[0] == TORCH, ADVICE


@pytest.mark.parametrize("name", READ)
def test_the_source_of_torch_is_the_one_that_was_read(name):
    assert digest_of(f"torch.distributed.distributed_c10d:{name}") == READ[name], ADVICE


def test_a_group_can_be_aborted():
    assert callable(torch.distributed.ProcessGroup.abort), ADVICE


def test_no_other_private_name_of_torch_is_imported():
    found = {
        (str(path.relative_to(ROOT)), alias.name)
        for path in (ROOT / "bridge").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    }
    assert found == PRIVATE


@pytest.mark.parametrize("fails", [False, True])
def test_the_policy_holds_while_a_group_is_made_and_not_afterwards(monkeypatch, fails):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    before = dict(os.environ)

    def make() -> None:
        with error_policy():
            assert {name: os.environ[name] for name in POLICY} == POLICY
            if fails:
                raise RuntimeError("a member has not come")

    if fails:
        with pytest.raises(RuntimeError, match="has not come"):
            make()
    else:
        make()
    assert dict(os.environ) == before


def test_threads_make_groups_at_the_same_time_and_the_last_one_ends_the_policy(monkeypatch):
    """Two ranks that make the same groups in another order would otherwise wait for each other."""
    for name in POLICY:
        monkeypatch.delenv(name, raising=False)
    both = threading.Barrier(2)
    may_end = threading.Event()

    def make() -> None:
        with error_policy():
            both.wait(PATIENCE_S)
            assert may_end.wait(PATIENCE_S)

    other = threading.Thread(target=make)
    other.start()
    with error_policy():
        both.wait(PATIENCE_S)
    assert {name: os.environ[name] for name in POLICY} == POLICY, "the other thread is not done"
    may_end.set()
    other.join(PATIENCE_S)
    assert not POLICY.keys() & os.environ.keys()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_only_groups_of_nccl_are_made_under_the_policy(monkeypatch, backend):
    made = []

    def helper(*_, device_id, **__):
        made.append((device_id, {name: os.environ.get(name) for name in POLICY}))
        return object(), None

    monkeypatch.setattr(peers, "_new_process_group_helper", helper)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("stream of", device))
    for name in POLICY:
        monkeypatch.delenv(name, raising=False)
    device = torch.device("cuda", 3)
    store = torch.distributed.HashStore()
    Peers(store, "e", 0, 1, backend=backend, device=device, timeout_s=1.0)
    nothing = dict.fromkeys(POLICY)
    assert made == [(device, POLICY) if backend == "nccl" else (None, nothing)]
