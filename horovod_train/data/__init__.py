"""Turns records on disk into batches on one rank. Start with dataset.open_records, then pipeline.build_pipeline."""
