"""Who started this process, how ranks meet, and what suits Horovod where they run."""
