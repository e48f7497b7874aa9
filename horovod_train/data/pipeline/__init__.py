"""Makes one rank's batches of stored records. Start with pipeline; batch and batch_source say what training gets."""
