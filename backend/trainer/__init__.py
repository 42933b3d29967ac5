"""One rank of the trainer: what it scores, what it learns from, and how its weights leave."""
