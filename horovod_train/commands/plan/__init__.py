"""The command `plan`: what a config means on N ranks, before anything starts."""
