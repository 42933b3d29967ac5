"""Users read streams of a whole run while its weights change, and one of its engines is killed."""

from pathlib import Path

from benchmarks.streaming.run import Load, measure


def test_every_answer_arrives_whole_through_updates_and_the_loss_of_an_engine(tmp_path: Path):
    result = measure(Load("abort", clients=12, updates=6, tokens=150, kills=True), tmp_path)
    found = result.found
    assert found.is_clean, found.examples
    assert result.is_audit_clean
    assert result.updates == 6
    assert found.crossing, "answers were on their way in an update"
    assert found.repeats > 10
