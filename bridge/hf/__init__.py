"""An HF checkpoint directory: its config, the index of its tensors, and its files.

config  read ``config.json`` through typed accessors
index   which tensors the safetensors files hold, from their headers
quantization  how quantized weights are stored, and which weights an engine keeps in fp8
quantized     the arithmetic of quantized weights
bucket  HF tensors that travel together in one flat tensor
files   read single tensors; write a whole checkpoint, with what is ``kept`` of the one before
copy    write a checkpoint once more, unquantized or in fp8
peft    read and write a low-rank adapter in PEFT's format; peft_config: its config
"""
