"""Integer answers after `Answer:`, as DAPO grades them."""

import re

from slime.rollout.rm_hub.math_utils import last_box

_TAIL = 300
"""Characters at the end of a response that are looked at."""

_NOISE = re.compile(
    r"square|ways|integers|dollars|mph|inches|hours|km|units|sue|points|feet|minutes|digits|cents|degrees|cm"
    r"|gm|pounds|meters|meals|edges|students|childrentickets|multiples|\\l?dots|\\text\{(?:s|\.|\n|\ns)?\}"
    r"(?:\^[23])?|\\mathrm\{th\}|\^\\circ|\^\{\\circ\}|\\;|,\\!|\{,\}|\"|<\|im_end\|>|<\|endoftext\|>"
)
"""Units and marks that do not change the value of an answer."""


def last_boxed_only_string(string: str):
    """Return the last `\\boxed{...}` of a text; None: there is no whole one."""
    return last_box(string, ("\\boxed",))


def remove_boxed(s: str) -> str:
    """Return what is in a box. Raises AssertionError for anything else."""
    if not (s.startswith("\\boxed{") and s.endswith("}")):
        raise AssertionError(f"box error: {s}")
    return s[len("\\boxed{") : -1]


def normalize_final_answer(final_answer) -> str:
    """Return an answer without units, articles, spaces and LaTeX that does not change its value."""
    answer = str(final_answer).rpartition("=")[2]
    for before, after in (("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", "")):
        answer = answer.replace(before, after)
    answer = answer.replace("mbox", "text").replace("\\text{and}", "").replace("\\text{m}", "\\text{}")
    answer = _NOISE.sub("", answer)
    if math := re.search(r"\$(.*?)\$", answer):
        answer = math[1]
    answer = re.sub(r"\\(?:text|textbf|overline)\{(.*?)\}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()


def is_correct_minerva(solution_str, gt, gt_need_extract=False, answer_pattern=r"(?i)Answer\s*:\s*([^\n]+)"):
    """Return whether the last `Answer: ...` is the integer ``gt``, and what it says."""
    answers = re.findall(answer_pattern, solution_str)
    given = normalize_final_answer(answers[-1] if answers else "[INVALID]")
    expected = normalize_final_answer(remove_boxed(last_boxed_only_string(gt)) if gt_need_extract else gt)
    return given == str(int(float(expected))), given


def is_correct_strict_box(pred, gt, pause_tokens_index=None):
    """Return 1 if the box in the last 100 characters holds exactly ``gt``, else -1; and what it holds."""
    start = pause_tokens_index[-1] - 100 if pause_tokens_index is not None else -100
    box = last_boxed_only_string(pred[start:])
    given = None if box is None else remove_boxed(box)
    return (1 if given == gt else -1), given


def verify(solution_str, answer, strict_box_verify=False, pause_tokens_index=None):
    """Return whether a solution is correct, and its answer."""
    if strict_box_verify:
        score, given = is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return score == 1, given
    return is_correct_minerva(solution_str, answer)


def compute_score(solution_str, ground_truth, strict_box_verify=False, pause_tokens_index=None) -> dict:
    """Return `score` (1.0 or -1.0), `acc` (whether it is correct) and `pred` (the answer)."""
    correct, given = verify(solution_str[-_TAIL:], ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": given}
