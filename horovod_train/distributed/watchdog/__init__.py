"""Ranks watch each other: heartbeats, stall detection, who failed first."""
