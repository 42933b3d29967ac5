"""Everything wrong that a user can hand in, and every way in which an episode can fail.

``python -m tests.wrong_inputs`` prints each message.

case (data) ──► folder with a sound recipe, made wrong ──► the command ──► message ──► its words, by hand
recipes data models plugins supervised machine logs         inputs.py
case (code) ──► collectors and judges without engines ────────────────► message ──► its words, by hand
failing_episodes                                            episodes.py
"""
