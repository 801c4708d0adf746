"""Exports models of the catalog to ONNX, and checks and imports ONNX files."""
