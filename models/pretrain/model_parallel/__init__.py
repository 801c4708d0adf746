"""A model taken apart: matrices, sequences and experts spread over processes, the order of pipelines, recomputation."""
