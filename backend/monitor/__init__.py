"""Output of a run: metrics (JSON lines and TensorBoard), a trace, progress on the terminal and a summary.

``tables`` and ``figure`` give all reports one style; only ``figure`` loads matplotlib. The package runs in
the driver process and imports neither torch nor Ray, SGLang or Megatron, so that any machine can read and
draw what a machine with GPUs has logged.
"""
