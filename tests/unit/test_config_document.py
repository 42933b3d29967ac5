"""Recipe text and overrides: what YAML means here, and mistakes with their lines."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.configs.document import read_document
from slipstream.configs.violations import ABSENT


@pytest.fixture
def read(tmp_path):
    def _read(text: str | bytes, *overrides: str):
        file = tmp_path / "recipe.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_document(file, overrides)

    return _read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("3E+4", 3e4),
        ("3.0e-4", 3e-4),
        ("-.5", -0.5),
        ("1_000", 1000),
        ("0", 0),
        ("-7", -7),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("on", "on"),
        ("no", "no"),
        ("010", "010"),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        ("'1e-5'", "1e-5"),
        ("1e", "1e"),
        ("e5", "e5"),
    ],
)
def test_scalars_mean_the_same_in_a_file_and_in_an_override(read, text, value):
    for document in (read(f"a: {text}"), read("b: 1", f"a={text}")):
        assert document.data["a"] == value and type(document.data["a"]) is type(value)
        assert not document.violations


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_python_float_is_read_back(number):
    document = read_document(Path("quickstart"), [f"a={number!r}"])
    assert document.data["a"] == number and isinstance(document.data["a"], float)


def test_repeated_keys_are_found_at_every_depth_with_their_lines(read):
    document = read("a:\n  b: 1\n  c: {d: 1, d: 2}\n  b: 3\na: 4\n")
    reasons = {violation.path: violation.reason for violation in document.violations}
    assert reasons == {
        "a.b": "given twice, on lines 2 and 4; keep one",
        "a.c.d": "given twice, on line 3; keep one",
        "a": "given twice, on lines 1 and 5; keep one",
    }


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n- b\n", "expected a mapping"),
        ("a: [1\nb: 2\n", "not valid YAML: line 2, column 2"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("a: !!python/name:os.system\n", "not valid YAML: line 1"),
        ("? [1, 2]\n: 3\n", "not valid YAML"),
        ("a: &a\n  b: [1, *a]\n", "line 1: a mapping or list contains itself"),
        ("a: " + "9" * 5000, "a number cannot be read"),
        ("a: " + "[" * 5000, "nested too deeply"),
        (b"a: \xff\n", "not UTF-8 text"),
        (b"a: \x07\n", "is not allowed in YAML"),
    ],
)
def test_text_that_is_no_recipe_is_one_violation(read, text, part):
    document = read(text)
    assert document.data is None
    assert part in document.violations[0].reason


def test_a_file_that_is_not_there_and_a_directory_are_violations(tmp_path):
    for file, part in (
        (tmp_path / "none.yaml", "no such recipe file"),
        (tmp_path, "this is a folder"),
        (tmp_path / "none" / "my.yaml", "none has no YAML file"),
        (Path("quickstrt"), "did you mean quickstart?"),
        (Path("a\0b"), "cannot be read"),
        (Path("x" * 5000), "cannot be read"),
    ):
        document = read_document(file, [])
        assert part in document.violations[0].reason
        assert document.violations[0].value is ABSENT


def test_keys_that_are_not_text_are_removed(read):
    document = read("a:\n  2: x\n  true: y\n  b: [{3: z}]\n  rest: 1\n")
    assert document.data == {"a": {"b": [{}], "rest": 1}}
    assert {violation.path for violation in document.violations} == {"a.2", "a.true", "a.b.0.3"}


def test_shared_aliases_cost_no_more_than_their_text(read):
    levels = "\n".join(f"l{n}: &l{n} {{a: *l{n - 1}, b: *l{n - 1}}}" for n in range(1, 60))
    assert not read(f"l0: &l0 {{x: 1}}\n{levels}\n").violations


def test_overrides_set_values_in_order_and_make_sections(read):
    document = read("a: {b: 1}\ne:\n", "a.b=2", "a.b=3", "c.d.e=[1, 2]", "e.f=null", "a.g={h: 1e-3}", "a.t=")
    assert not document.violations
    assert document.data == {
        "a": {"b": 3, "g": {"h": 1e-3}, "t": None},
        "c": {"d": {"e": [1, 2]}},
        "e": {"f": None},
    }


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("a", "there is no '='"),
        ("=1", "part of the key is empty"),
        ("a..b=1", "part of the key is empty"),
        (".a=1", "part of the key is empty"),
        ("a.b.c=1", "a.b is 1, not a mapping"),
        ("a.b=[1", "not valid YAML"),
    ],
)
def test_a_wrong_override_is_a_violation_and_changes_nothing(read, override, part):
    document = read("a: {b: 1}\n", override)
    assert part in document.violations[0].reason
    assert document.data == {"a": {"b": 1}}


def test_overrides_are_checked_also_when_the_file_is_not_readable(tmp_path):
    document = read_document(tmp_path / "none.yaml", ["a", "b=1"])
    assert len(document.violations) == 2
