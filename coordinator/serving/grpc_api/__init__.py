"""The Open Inference Protocol over gRPC, with Triton's index, configuration and statistics, for any inference service."""
