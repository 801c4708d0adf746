"""Model parallelism: tensor, context, expert and pipeline parallelism, and activation recomputation."""
