"""The checkpoints of a run: names, manifests, tensors, and the manager that writes and keeps them."""
