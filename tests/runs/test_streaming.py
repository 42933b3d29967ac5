"""Users read streams of a whole run while its weights change, and one of its engines is killed."""

from pathlib import Path

import pytest

from benchmarks.streaming.run import Load, measure


@pytest.mark.slow  # test_engine_weights.py has updates and a lost engine
@pytest.mark.timeout(600)
def test_every_answer_arrives_whole_through_updates_and_the_loss_of_an_engine(tmp_path: Path):
    result = measure(Load("abort", clients=12, updates=3, tokens=100, kills=True), tmp_path)
    answers = result.account
    assert answers.is_clean, answers.examples
    assert result.is_audit_clean
    assert result.updates == 3
    assert answers.crossing, "answers were on their way in an update"
    assert answers.repeats > 10
