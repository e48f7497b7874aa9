"""Records on disk to batches on one rank. Start with records.open_records, then pipeline.build_pipeline."""
