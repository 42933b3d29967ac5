"""Answers with the value that a person gives them: choices, mathematics, and programs.

What a reward gives differently is listed in DIFFERS, with the reason. At most four rows may be.
"""

import asyncio

import pytest

from slipstream.rollout.reward import Choice, CodeTests, MathVerify
from slipstream.rollout.tokens.trajectory import Prompt
from tests.unit.judging import trajectory

CHOICES = [
    ("C", "C", 1),
    ("C", "(C)", 1),
    ("C", "[C]", 1),
    ("C", "**C**", 1),
    ("C", "c)", 1),
    ("C", "The answer is: C", 1),
    ("C", "**Answer: C**", 1),
    ("C", "Answer: **C**", 1),
    ("C", "The right answer is option C.", 1),
    ("C", "the right option is C", 1),
    ("C", "The best choice is C, since it is larger.", 1),
    ("C", "I would pick C", 1),
    ("C", "I'd go with (C).", 1),
    ("C", "So C is right.", 1),
    ("C", "C is the correct answer.", 1),
    ("C", "Option C is correct.", 1),
    ("C", "It must be C.", 1),
    ("C", "The answer should be C", 1),
    ("C", "The answer is therefore C.", 1),
    ("C", "\\boxed{C}", 1),
    ("C", "\\boxed{\\text{C}}", 1),
    ("C", "\\boxed{\\text{C. Rome}}", 1),
    ("C", "I say A. <answer>C</answer>", 1),
    ("C", "<answer> (C) Rome </answer>", 1),
    ("C", "C) Rome", 1),
    ("C", "正确答案是C", 1),
    ("C", "答案\uff1aC。", 1),
    ("C", "我选择C", 1),
    ("C", "Die Antwort ist C.", 1),
    ("C", "Hence the answer is **(C) Rome**.", 1),
    ("C", "The answer is B. No, wait: the answer is C.", 1),
    ("C", "The answer is not B. It is C.", 1),
    ("C", "My answer: C, not B", 1),
    ("C", "The final answer is $\\boxed{C}$. I hope that helps.", 1),
    ("C", "## Answer\nC", 1),
    ("C", "Thus, C.", 1),
    ("C", "<think>The answer is A?</think>The answer is C", 1),
    ("C", "The answer is (C).\n\nA and B are wrong, because D is.", 1),
    ("C", "The answer isn't C, the answer is B", 0),
    ("C", "Neither B nor C is correct.", 0),
    ("C", "Is it true that C is correct?", 0),
    ("C", "B and C. Answer: B and C", 0),
    ("A", "The answer is a matter of luck", 0),
    ("A", "A dog", 0),
    ("A", "I choose a card", 0),
    ("A", "It is a dog.", 0),
    ("A", "The answer is not A", 0),
]
"""Label, response, value."""

MATHEMATICS = r"""
3/4 | \boxed{0.75} | 1
\frac{3}{4} | \boxed{\dfrac34} | 1
25\% | \boxed{0.25} | 1
25 | \boxed{25\%} | 1
0.25 | \boxed{25\%} | 1
2,500 | \boxed{2500} | 1
2500 | \boxed{2,500} | 1
2{,}500{,}000 | \boxed{2500000} | 1
10^5 | \boxed{100000} | 1
24 | \boxed{\$24} | 1
24 | \boxed{\$24.00} | 1
12 \text{ kg} | \boxed{12} | 1
12 | \boxed{12\text{ kg}} | 1
12 | \boxed{12 \mathrm{~m}^2} | 1
45 | \boxed{45^\circ} | 1
45 | \boxed{45^{\circ}} | 1
(3,4) | \boxed{(3, 4)} | 1
(3,4) | \boxed{(4, 3)} | 0
\{3,4\} | \boxed{\{4,3\}} | 1
3,4 | \boxed{4, 3} | 1
(0,2] | \boxed{(0,2]} | 1
(0,2] | \boxed{[0,2]} | 0
(0,2) | \boxed{[0,2]} | 0
(-\infty,1]\cup(5,\infty) | \boxed{(5,\infty)\cup(-\infty,1]} | 1
y=7 | \boxed{7} | 1
7 | \boxed{y=7} | 1
x>5 | \boxed{5<x} | 1
x \geq 5 | \boxed{[5,\infty)} | 1
x \ge 5 | \boxed{x > 5} | 0
\sqrt{12} | \boxed{2\sqrt{3}} | 1
\frac{\sqrt3}{3} | \boxed{\frac{1}{\sqrt{3}}} | 1
\pi/4 | \boxed{0.7854} | 0
2.71828 | \boxed{e} | 0
4\pi | \boxed{12.566371} | 1
\begin{pmatrix}5&6\\7&8\end{pmatrix} | \boxed{\begin{bmatrix}5&6\\7&8\end{bmatrix}} | 1
\begin{pmatrix}4\\5\end{pmatrix} | \boxed{\begin{pmatrix}4\\6\end{pmatrix}} | 0
x^2-4x+4 | \boxed{(x-2)^2} | 1
x^2-9 | \boxed{(x-3)(x+2)} | 0
\text{D} | \boxed{D} | 1
D | \boxed{\text{(D)}} | 1
\text{Friday} | \boxed{Friday} | 1
\text{Alice} | \boxed{\text{Alice}} | 1
\text{north} | \boxed{\text{south}} | 0
8 | The answer is \boxed{6}. No: \boxed{8}. | 1
8 | The answer is \boxed{8}. No: \boxed{6}. | 0
8 | First \boxed{2}, then \boxed{8}, at last \boxed{1} | 0
8 | \fbox{6} and then \boxed{8} | 1
5 | \boxed{5 \text{ or } 6} | 0
5 | \boxed{5 \text{ and } 6} | 0
5 | \boxed{4, 5, 6} | 0
2\frac{1}{4} | \boxed{2.25} | 1
2 \frac{1}{4} | \boxed{\frac{9}{4}} | 1
0.667 | \boxed{\frac23} | 0
2/3 | \boxed{0.666667} | 1
0.2 | \boxed{0.20000001} | 1
200 | \boxed{2 \times 10^2} | 1
1.6 \times 10^{-19} | \boxed{1.6e-19} | 1
3e8 | \boxed{3 \times 10^8} | 1
1.6 \times 10^{-19} | \boxed{1.6e-18} | 0
-7 | \boxed{- 7} | 1
-7 | \boxed{7} | 0
9:45 | \boxed{9:45} | 1
2^{8} | \boxed{256} | 1
\binom{6}{2} | \boxed{15} | 1
4! | \boxed{24} | 1
\log_3 9 | \boxed{2} | 1
i | \boxed{\sqrt{-1}} | 1
2i | \boxed{\sqrt{-4}} | 1
3+i | \boxed{i+3} | 1
\frac{2}{5} | \boxed{2:5} | 1
2:5 | \boxed{2:5} | 1
2.5 | \boxed{2,5} | 0
\emptyset | \boxed{\varnothing} | 1
\varnothing | \boxed{\emptyset} | 1
\infty | \boxed{+\infty} | 1
110_2 | \boxed{110_{2}} | 1
110_2 | \boxed{110} | 0
21_3 | \boxed{21_4} | 0
36 | \boxed{36}<|im_end|> | 1
36 | \boxed{\textbf{36}} | 1
36 | \boxed{{36}} | 1
36 | $\boxed{36}$. | 1
36 | \boxed{36.} | 1
36 | \boxed{ 36 \, } | 1
036 | \boxed{36} | 1
36 | \boxed{36.0} | 1
36 | \fbox{36} | 1
3 | \boxed{3\text{ cats and }4\text{ dogs}} | 0
3 | \boxed{3\text{ cats}} | 1
\frac{x}{y} | \boxed{x/y} | 1
y=3x-1 | \boxed{3x-1} | 1
y=3x-1 | \boxed{3x-1=y} | 1
3x-y-1=0 | \boxed{y=3x-1} | 1
A,C | \boxed{AC} | 1
A,C | \boxed{C, A} | 1
AC | \boxed{\text{A and C}} | 1
A,C | \boxed{A} | 0
A,C | \boxed{A, B} | 0
\text{False} | \boxed{\text{false}} | 1
\text{Yes} | \boxed{\text{No}} | 0
49 | <think> it is \boxed{49} </think> I do not know. | 0
49 | <think> it is \boxed{48} </think> \boxed{49} | 1
49 | <think> it is \boxed{49} | 0
4 | Final: **4** | 0
"""
"""Label, response, value where only a box is an answer."""

DIFFERS: dict[tuple[str, str], str] = {}
"""Rows that get another value than a person gives, and why it stays so."""


@pytest.mark.parametrize(("label", "response", "value"), CHOICES)
def test_choices_are_read_as_a_person_reads_them(label, response, value):
    assert asyncio.run(Choice(letters="ABCD").score(Prompt(1, "?", label), response, trajectory())) == value


def rows() -> list[list[str]]:
    return [line.split(" | ") for line in MATHEMATICS.strip().splitlines()]


@pytest.mark.parametrize("answer", ["boxed", "any"])
def test_mathematics_is_compared_as_a_person_compares_it(answer):
    reward, found = MathVerify(answer=answer), {}
    for label, response, value in rows():
        if answer == "any" and "box" not in response:
            continue  # what is no box is an answer there
        given = reward.score(Prompt(1, "?", label), response, trajectory())
        if given != float(value):
            found[label, response] = given
    assert found.keys() == DIFFERS.keys()
    assert len(DIFFERS) <= 4 and len(rows()) >= 91


ADDS = "a, b = map(int, input().split())\nprint(a + b)"
SUMS = [{"input": "2 3\n", "output": "5\n"}]
TRIPLE = ["assert triple(2) == 6", "assert triple('a') == 'aaa'"]
FENCED = "```python\n{}\n```"

# ruff: noqa: E501
PROGRAMS = [
    (SUMS, FENCED.format(ADDS), 1),
    (SUMS, FENCED.format(ADDS) + "\nIt prints:\n```\n5\n```", 1),
    (SUMS, FENCED.format(ADDS) + "\nStart it:\n```sh\npython sum.py\n```", 1),
    (SUMS, f"```\n{ADDS}\n```\nOutput:\n```\n5\n```", 1),
    (SUMS, f"```python\n{ADDS}\n", 0),
    (SUMS, ADDS, 0),
    (SUMS, FENCED.format("print(4)") + "\nBetter:\n" + FENCED.format(ADDS), 1),
    (SUMS, FENCED.format(ADDS) + "\nOr:\n" + FENCED.format("print(4)"), 0),
    (SUMS, f"~~~py\n{ADDS}\n~~~", 1),
    (SUMS, f'```python title="sum.py"\n{ADDS}\n```', 1),
    ([{"input": "", "output": "1.50"}], FENCED.format("print(1.5)"), 1),
    ([{"input": "2 3\r\n", "output": "5\r\n"}], FENCED.format(ADDS), 1),
    ({"inputs": ["2 3"], "outputs": ["5"]}, FENCED.format(ADDS), 1),
    ([{"input": "2 3", "output": "6"}], FENCED.format(ADDS), 0),
    (TRIPLE, FENCED.format("def triple(x):\n    return 3 * x"), 1),
    (TRIPLE, FENCED.format("def triple(x):\n    return 3 * x") + "\n" + FENCED.format("print(triple(2))"), 1),
    (TRIPLE, FENCED.format("def triple(x):\n    return 3 * x\nif __name__ == '__main__':\n    input()"), 1),
    (TRIPLE, FENCED.format("def triple(x):\n    return 6"), 0),
    (
        ["def check(candidate):\n    assert candidate(3) == 9\ncheck(triple)"],
        FENCED.format("triple = lambda x: 3 * x"),
        1,
    ),
    (
        [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional", "metadata": {"func_name": "f"}}],
        FENCED.format("class Solution:\n    def f(self, xs, y):\n        return sum(xs) + y"),
        1,
    ),
    ({"fn_name": "f", "inputs": ["[1, 2]\n3"], "outputs": ["6"]}, FENCED.format("f = lambda x, y: sum(x) + y"), 1),
    ({"fn_name": "f", "inputs": [[[1, 2], 3]], "outputs": [[6]]}, FENCED.format("f = lambda x, y: sum(x) + y"), 1),
    ({"fn_name": "f", "inputs": [[[1, 2], 3]], "outputs": [7]}, FENCED.format("f = lambda x, y: sum(x) + y"), 0),
    (TRIPLE[:1], FENCED.format("class E(int):\n    def __eq__(s, o): return True\ndef triple(x): return E(0)"), 0),
    (TRIPLE[:1], FENCED.format("import os\ndef triple(x): os._exit(0)"), 0),
    (TRIPLE[:1], FENCED.format("import builtins\nbuiltins.compile = lambda *a, **k: 'pass'"), 0),
    ([{"input": "", "output": "1"}], FENCED.format("import numpy as np\nprint(np.int64(1))"), 1),
    (SUMS, FENCED.format("a, b = map(int, open(0).read().split())\nprint(a + b)"), 1),
    ([{"input": "", "output": "```"}], "````python\nprint('```')\n````", 1),
]  # fmt: skip
"""Cases, response, value."""


def test_programs_get_what_a_person_gives_them():
    reward = CodeTests(sandbox={"type": "local", "wall_s": 60})

    async def ask():
        free = asyncio.Semaphore(2)

        async def about(cases, response):
            async with free:
                return await reward.score(Prompt(1, "?", cases), response, trajectory())

        return await asyncio.gather(*(about(cases, response) for cases, response, _ in PROGRAMS))

    values = asyncio.run(ask())
    wrong = [row for row, value in zip(PROGRAMS, values, strict=True) if value != row[2]]
    assert not wrong and len(PROGRAMS) >= 29
