"""What each process of ours stands on: children, links between processes, files, memory, plug-ins.

It knows nothing of language models: no token, no engine, no group.
"""
