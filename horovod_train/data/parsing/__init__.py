"""Turns serialized records into arrays, many in one call. Start with serialized."""
