"""The base of each process: children, links between processes, files, memory, plug-ins.

Nothing in here knows language models: no token, no engine, no group.
"""
