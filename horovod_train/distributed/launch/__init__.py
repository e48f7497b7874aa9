"""Detect how this process was started, bring the ranks together, and choose Horovod's settings for the place."""
