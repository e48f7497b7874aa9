"""The checkpoints of a run: folder names, manifests, tensors, and the manager that writes and keeps them."""
