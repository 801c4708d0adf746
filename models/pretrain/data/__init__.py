"""What is trained on: sources of examples, the batches that processes share in, reading ahead."""
