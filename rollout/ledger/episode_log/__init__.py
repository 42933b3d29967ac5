"""The episode log of a run: every episode as text, whether it was trained, given up or an evaluation.

files       the files: rows in the order of their ends, bounded in number and bytes
rows        what a row says of an episode
token_text  tokens as text
thread      the thread that writes
"""
