"""The reward of a response: 1 if the text after its last '#' is the label, else 0."""


def score(prompt, response, trajectory):
    """Return the number that trains, `reward`, and others that are metrics.

    prompt.label, prompt.metadata: the columns of the data. response: the text of the policy.
    """
    _, mark, answer = response.rpartition("#")
    is_right = bool(mark) and answer.strip() == prompt.label
    return {"reward": float(is_right), "has_answer": float(bool(mark))}
