"""What a training step consumes: batches, micro-batches, packing, and what a step returns. Pure numpy."""
