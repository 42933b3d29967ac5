"""The engine's side of publishing without files. Runs inside every scheduler process of an SGLang server.

loader_trace  where the model's own loader puts the elements of each HF tensor
take          the weight loader that the server calls: describe, join, receive; locate, load
orders        the orders of the trainer's head to the ranks of an engine, and their answers
memory_reader a rank of an engine as a reader of whole tensors in the trainer's memory
receiver      a rank of an engine as a receiver: its messages, and their places in its parameters

SGLang imports these modules, so they need torch, msgspec and pure modules of the bridge only.
"""
