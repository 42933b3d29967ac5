"""An HF checkpoint directory: its config, the index of its tensors, and its files.

config  read ``config.json`` through typed accessors
index   which tensors the safetensors files hold, from their headers
bucket  HF tensors that travel together in one flat tensor
files   read single tensors; write a whole checkpoint
"""
