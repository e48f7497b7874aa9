"""What a run writes and prints: the run directory, metrics, TensorBoard, logs, the lease."""
