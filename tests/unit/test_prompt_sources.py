"""Several sources: shares, order, resumption; long prompts, stored prompts, patterns and the hub."""

import json
import tracemalloc

import pytest

from slipstream.backend.driver.start.length_filter import LengthFilter
from slipstream.configs.schema import PromptFile
from slipstream.rollout.prompts import (
    PromptError,
    PromptSet,
    PromptStream,
    SourcePrompts,
    StoredPrompts,
    checked_prompts,
)
from slipstream.rollout.prompts import reading as prompt_files
from slipstream.rollout.prompts.order import turn_at, whole_shares
from slipstream.rollout.tokens.trajectory import Prompt


def source(name, size, weight=None):
    return SourcePrompts([Prompt(i, f"{name} {i}", source=name) for i in range(size)], name, weight)


def order(prompts, n, first=0, seed=3):
    stream = PromptStream(prompts, shuffle=True, seed=seed, position=first)
    return [stream.at(stream.draw()) for _ in range(n)]


# ---- shares


@pytest.mark.parametrize(
    "weights", [[1, 1], [3, 1], [0.7, 0.2, 0.1], [1, 1000], [5, 5, 5, 1e-3], [0.1, 0.1, 0.3], [1e6, 3, 1 / 3]]
)
def test_among_the_first_n_prompts_each_source_has_its_share_of_n(weights):
    shares = whole_shares(weights)
    counts = [0] * len(weights)
    for n in range(3000):
        place, before = turn_at(shares, n)
        assert before == counts[place], "the turns of a source are counted without gaps"
        counts[place] += 1
        for weight, count in zip(weights, counts, strict=True):
            assert abs(count - (n + 1) * weight / sum(weights)) < len(weights)


def test_any_position_far_away_is_looked_up_at_once():
    shares = whole_shares([0.7, 0.2, 0.1])
    turns = [turn_at(shares, 10**12 + n) for n in range(1000)]
    assert [sum(place == each for place, _ in turns) for each in range(3)] == [700, 200, 100]


def test_the_realized_shares_follow_the_weights_and_each_source_goes_through_its_epochs():
    prompts = PromptSet([source("math", 30, 3), source("code", 7, 1)])
    drawn = order(prompts, 400)
    assert [each.source for each in drawn].count("math") == 300
    math = [each.id for each in drawn if each.source == "math"]
    assert all(sorted(math[start : start + 30]) == list(range(30)) for start in range(0, 300, 30))
    assert len({tuple(math[start : start + 30]) for start in range(0, 300, 30)}) == 10


def test_without_weights_all_prompts_come_equally_often():
    prompts = PromptSet([source("a", 90), source("b", 10)])
    drawn = order(prompts, 1000)
    assert {drawn.count(each) for each in (*prompts.sources[0].prompts, *prompts.sources[1].prompts)} == {10}


@pytest.mark.parametrize("position", [0, 1, 17, 399, 12345])
def test_a_resumed_mixture_continues_the_order(position):
    prompts = PromptSet([source("math", 30, 0.55), source("code", 7, 0.25), source("chat", 11, 0.2)])
    whole = order(prompts, position + 50)
    assert order(prompts, 50, first=position) == whole[position:]


def test_the_order_of_a_mixture_is_the_same_for_ever():
    prompts = PromptSet([source("math", 5, 2), source("code", 3, 1)])
    drawn = [(each.source, each.id) for each in order(prompts, 6, seed=0)]
    assert drawn == [("math", 0), ("code", 2), ("math", 2), ("math", 1), ("code", 0), ("math", 4)]


def test_sources_of_one_size_are_shuffled_differently():
    prompts = PromptSet([source("a", 50), source("b", 50)])
    drawn = order(prompts, 100)
    a, b = ([each.id for each in drawn if each.source == name] for name in "ab")
    assert a != b and sorted(a) == sorted(b)


# ---- stored prompts


def test_stored_prompts_are_those_that_were_read(monkeypatch):
    prompts = [Prompt(i, "ä" * i, {"n": i}, {"m": [1.5]}, "file.jsonl", i + 1, "math") for i in range(40)]
    for memory in (1 << 20, 10):  # in memory and in a file
        monkeypatch.setattr("slipstream.rollout.prompts.stored.IN_MEMORY", memory)
        stored = StoredPrompts(iter(prompts))
        assert list(stored) == prompts and stored[3:6] == prompts[3:6] and stored[-1] == prompts[-1]
        assert (stored[7].file, stored[7].line, stored[7].source) == ("file.jsonl", 8, "math")
        with pytest.raises(IndexError):
            stored[40]


def test_many_prompts_take_little_memory():
    prompts = (Prompt(i, "x" * 500, i) for i in range(100_000))
    tracemalloc.start()
    stored = StoredPrompts(prompts)
    stream = PromptStream(PromptSet.of(stored), shuffle=True, seed=0)
    assert stream.at(150_000).prompt == "x" * 500
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 24 << 20, "50 MB of prompts"


def test_a_set_of_several_sources_is_one_sequence():
    prompts = PromptSet([source("a", 2), source("b", 3)])
    assert [each.prompt for each in prompts] == ["a 0", "a 1", "b 0", "b 1", "b 2"]
    assert (len(prompts), prompts[-1].prompt, len(prompts[1:4])) == (5, "b 2", 3)
    assert not PromptSet()


# ---- long prompts


class Characters:
    """A token for each character, and ten that the template adds."""

    chat_template = "template"

    def __init__(self):
        self.rendered = 0

    def apply_chat_template(self, conversation, **kwargs):
        self.rendered += 1
        if any(message["role"] == "tool" for message in conversation):
            raise ValueError("no tools")
        return [0] * (10 + sum(len(message["content"]) for message in conversation))


def test_prompts_above_the_limit_are_left_out_and_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    lengths = [5, 90, 91, 200, 1, 90]
    path.write_text("".join(json.dumps({"prompt": "x" * n}) + "\n" for n in lengths))
    tokenizer = Characters()
    keeps = LengthFilter(tokenizer, 100)
    prompts = list(checked_prompts(PromptFile(path), keeps=keeps))
    assert [(each.id, len(each.prompt)) for each in prompts] == [(0, 5), (1, 90), (4, 1), (5, 90)]
    assert keeps.left_out == 2


def test_short_prompts_are_not_tokenized():
    tokenizer = Characters()
    keeps = LengthFilter(tokenizer, 100)
    assert all(keeps(Prompt(i, "x" * 20)) for i in range(1000))
    assert tokenizer.rendered == 1
    assert keeps(Prompt(0, "x" * 90)) and tokenizer.rendered == 2, "it might have been too long"


def test_a_prompt_that_the_template_refuses_is_left_to_the_checks():
    keeps = LengthFilter(Characters(), 100)
    assert keeps(Prompt(0, [{"role": "tool", "content": "x" * 500}])) and not keeps.left_out


# ---- files


def test_several_files_by_a_pattern_are_read_in_the_order_of_their_names(tmp_path):
    for part in (2, 0, 1):
        (tmp_path / f"part-{part}.jsonl").write_text(json.dumps({"prompt": str(part)}) + "\n")
    prompts = list(checked_prompts(PromptFile(tmp_path / "part-*.jsonl")))
    assert [(each.id, each.prompt) for each in prompts] == [(0, "0"), (1, "1"), (2, "2")]
    assert prompts[2].reference.endswith("part-2.jsonl, line 1)")
    with pytest.raises(PromptError, match="no file has such a name"):
        list(checked_prompts(PromptFile(tmp_path / "other-*.jsonl")))


HUB = PromptFile(prompt_files.Path("hf://datasets/openai/gsm8k/main/train"))


def test_without_a_network_a_data_set_of_the_hub_names_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(PromptError, match=r"gsm8k/main/train cannot be downloaded: .*; download the files"):
        list(checked_prompts(HUB))


def test_without_the_hubs_library_a_data_set_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PromptError, match="pip install huggingface_hub; or download the files"):
        list(checked_prompts(HUB))


def test_the_files_of_a_data_set_whose_names_begin_so_are_read(monkeypatch, tmp_path):
    asked = []

    def snapshot(repository, **how):
        asked.append((repository, how["revision"], how["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    (tmp_path / "main").mkdir()
    for name in ("train-0", "train-1", "test-0"):
        (tmp_path / f"main/{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    assert [each.prompt for each in checked_prompts(HUB)] == ["train-0", "train-1"]
    assert asked == [("openai/gsm8k", None, ["main/train*.jsonl", "main/train*.parquet"])]
    for path, message in {
        "hf://datasets/openai/gsm8k": "has several files: main/test-0.jsonl, .*add the folder",
        "hf://datasets/openai/gsm8k/socratic": "begins with 'socratic'",
    }.items():
        with pytest.raises(PromptError, match=message):
            list(checked_prompts(PromptFile(prompt_files.Path(path))))
    revised = PromptFile(prompt_files.Path("hf://datasets/a/b@main/main/test"))
    assert len(list(checked_prompts(revised))) == 1
    assert asked[-1][:2] == ("a/b", "main")
