"""TFRecord files: finding records in them, reading them, and copies on a local disk."""
