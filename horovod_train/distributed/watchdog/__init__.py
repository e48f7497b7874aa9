"""Ranks watch each other: heartbeats, stall detection, and which rank failed first."""
