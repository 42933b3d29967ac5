"""What a run tells its user: metrics (JSON lines and TensorBoard), progress on the terminal, a summary.

Used from the driver process. Imports neither torch nor Ray, SGLang or Megatron, so what a machine with GPUs
has logged can be read and drawn on any other.
"""
