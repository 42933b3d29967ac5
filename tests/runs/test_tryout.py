"""``slipstream try``: real episodes with their texts and rewards, and who is to blame for those without."""

import json

from slipstream.rollout.workflow import SingleTurn
from tests.environment import environment


class Picky(SingleTurn):
    """A workflow that cannot stand the first prompt."""

    async def run(self, prompt, context):
        if prompt.id == 0:
            raise LookupError("there is no such page")
        context.metric("prompt_number", prompt.id)
        return await super().run(prompt, context)


def by_answer(prompt, response, trajectory):
    """A reward that looks for a column which only its author's data has."""
    return 0.5 if prompt.id % 2 else prompt.metadata["answer_idx"]


def test_episodes_are_shown_and_those_that_fail_name_their_culprit(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    lines = tmp_path / "train.jsonl"
    lines.write_text("".join(json.dumps({"prompt": f"a{n}b{n}", "label": "0"}) + "\n" for n in range(3)))
    run = launch(
        *("--json", "-n", "3", f"data.path={lines}"),
        "rollout.workflow=tests.runs.test_tryout.Picky",
        "rollout.reward=tests.runs.test_tryout.by_answer",
        by="try",
    )
    assert run.process.wait(180) == 1, run.output()
    episodes, end = json.JSONDecoder().raw_decode(run.output()[run.output().index("[") :])
    assert "2 of 3 episodes have failed: prompts 0, 2" in run.output()[end:]
    first, second, third = episodes
    assert [each["reward"] for each in episodes] == [None, 0.5, None]
    [attempt, *_] = first["failures"]
    assert attempt.startswith("Traceback") and "trial.py" not in attempt
    assert "test_tryout.py" in attempt and "LookupError: there is no such page" in attempt
    assert "by_answer" in third["failures"][-1] and "KeyError: 'answer_idx'" in third["failures"][-1]
    assert second["metrics"] == {"prompt_number": 1.0}
    [parts] = second["trajectories"]
    assert [part["sampled"] for part in parts] == [False, True]
    assert parts[0]["text"] == "<|user|>a1b1<|assistant|>" and second["response_length"] > 0
    run.assert_nothing_left()
    assert not run.folder.exists()
