"""The engine's side of shard-to-shard publishing. Runs inside every scheduler process of an SGLang server.

trace   where the model's own loader puts the elements of each HF tensor
take    the weight loader that the server calls: describe, join, receive

SGLang imports these modules, so they need torch, msgspec and pure modules of the bridge only.
"""
