"""The language model that judges: it is asked several times, and the plurality of its answers counts.

    turn ──prompt──► m requests ──parser──► votes ──strict plurality──► score
                                              └──────► hint ──► prompt with the hint ──► teacher ──► log-probs

Everything here runs in judge processes. ``judge_model.py`` is what the recipe's section ``judge`` names;
``turns.py`` judges turns of live users by it, ``answers.py`` whole episodes. ``endpoint.py`` reaches the
model, ``prompts.py`` and ``parsing.py`` are what ``functions.py`` may replace by code of the user's, and
``hints.py`` puts a hint into a prompt.
"""
