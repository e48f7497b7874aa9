"""TFRecord files: where their records are, reading them, and copies on a local disk."""
