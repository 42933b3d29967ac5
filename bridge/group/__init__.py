"""The meeting of trainer ranks and engine ranks. Both sides use these modules.

store    a key-value store on one address of the machine, by which processes find each other
peers    the process group of one engine and the trainer's ranks that send to it
handles  the ways to memory of the trainer, as they travel
memory   memory of the trainer that the engines on its node read
pinned   host memory for what leaves a GPU, pinned once
windows  the order in which both sides work through their messages
"""
