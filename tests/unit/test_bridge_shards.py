"""Shard-to-shard publishing between real processes: what arrives, and whom a failure costs."""

import re
import threading
from unittest.mock import Mock

import numpy as np
import pytest

from slipstream.bridge.engine.orders import Meeting, RankAnswer
from slipstream.bridge.group.store import put, serve_store
from slipstream.bridge.publish.publication import Timeouts
from slipstream.bridge.transport.commands import done_key
from slipstream.bridge.transport.ordering import TransferFailed
from slipstream.bridge.transport.sender import ShardSender
from slipstream.bridge.transport.shards import ShardTransport
from tests.ranks import run_ranks
from tests.shard_publishing import PATIENT, TIMEOUT_S, publish_thrice, tensors_of


def assert_holds(weights: dict[str, list[dict[str, np.ndarray]]], version: int) -> None:
    tensors = tensors_of(version)
    for ranks in weights.values():
        for name, tensor in tensors.items():
            whole = np.concatenate([rank[name] for rank in ranks]) if tensor.dim() > 1 else ranks[0][name]
            assert np.array_equal(whole, tensor.numpy()), name


def test_every_version_arrives_bit_for_bit_in_engines_of_one_and_two_ranks():
    (reports, _, versions, weights), _ = run_ranks(2, publish_thrice, {}, 1)
    assert [report.updated for report in reports] == [["one", "doomed", "two"]] * 3
    assert set(versions.values()) == {3}
    assert_holds(weights, 3)
    steps = ["ask", "pause", "begin", "connect", "receive", "end", "stamp", "resume"]
    assert list(reports[1].parts_s) == steps
    size = sum(tensor.nbytes for tensor in tensors_of(1).values())
    assert reports[1].bytes_sent > 0.9 * size


def test_an_engine_that_dies_in_a_transfer_costs_itself_alone():
    (reports, _, versions, weights), _ = run_ranks(2, publish_thrice, {"doomed": "dies"}, 1)
    assert reports[0].updated == ["one", "doomed", "two"]
    assert reports[1].updated == reports[2].updated == ["one", "two"]
    assert "receive for version 2: " in reports[1].failed["doomed"]
    assert versions == {"one": 3, "doomed": 1, "two": 3}
    assert_holds(weights, 3)


def test_a_rank_that_dies_takes_its_engine_with_it_and_no_other():
    (reports, _, versions, weights), _ = run_ranks(2, publish_thrice, {"doomed": "dies"}, 2)
    assert reports[1].updated == reports[2].updated == ["one", "two"]
    assert versions == {"one": 3, "doomed": 1, "two": 3}
    assert_holds(weights, 3)


def test_weights_that_are_changed_on_their_way_are_never_stamped():
    (reports, _, versions, weights), _ = run_ranks(2, publish_thrice, {"doomed": "spoils"}, 1)
    assert reports[1].updated == ["one", "two"]
    assert (
        "WrongDigest: rank 0 holds other values than were sent in 1 parameters: "
        in (reports[1].failed["doomed"])
    )
    assert versions == {"one": 3, "doomed": 1, "two": 3}
    assert_holds(weights, 3)


def test_an_engine_that_stands_still_in_a_transfer_holds_the_others_up_for_its_answer_time_out_alone():
    (reports, _, versions, weights), _ = run_ranks(
        2, publish_thrice, {"doomed": "stops"}, 2, Timeouts(TIMEOUT_S, 10)
    )
    assert reports[1].updated == reports[2].updated == ["one", "two"]
    found = re.fullmatch(
        r"receive for version 2: TransferFailed: no answer in (.*) s", reports[1].failed["doomed"]
    )
    assert found
    # A machine on which version 1 took long is given longer.
    assert float(found[1]) >= 10
    assert versions == {"one": 3, "doomed": 1, "two": 3}
    assert_holds(weights, 3)


def head_and_ranks(count: int, timeouts: Timeouts) -> tuple[ShardTransport, list[ShardSender]]:
    store = serve_store("127.0.0.1", 0, 1, TIMEOUT_S, wait=False)
    meeting = Meeting("127.0.0.1", store.port, TIMEOUT_S)
    transport = ShardTransport(
        store, meeting, [], trainer_ranks=count, backend="gloo", timeouts=timeouts, engines=1, digests=False
    )
    ranks = [
        ShardSender(Mock(), [{}], rank, meeting, backend="gloo", timeout_s=TIMEOUT_S) for rank in range(count)
    ]
    return transport, ranks


def test_the_head_keeps_its_store_until_every_rank_has_read_the_end_of_a_publication():
    transport, ranks = head_and_ranks(2, PATIENT)
    for _ in "12":
        finishing = threading.Thread(target=transport.finish, daemon=True)
        finishing.start()
        ranks[0].follow()
        finishing.join(0.1)
        assert finishing.is_alive(), "rank 1 has not read the end"
        ranks[1].follow()
        finishing.join(TIMEOUT_S)
        assert not finishing.is_alive()


def test_a_rank_that_does_not_read_the_end_of_a_publication_is_named():
    transport, _ = head_and_ranks(2, Timeouts(0.2, 0.2))
    put(transport._store, done_key(0, 0), RankAnswer())
    with pytest.raises(TransferFailed, match=r"ranks \[1\] of the trainer .* the publication within 0.2 s"):
        transport.finish()
