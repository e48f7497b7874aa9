"""Trackers of experiments: MLflow, W&B, CSV files or a class of the user's, which get what metrics.jsonl gets.

To add one: a file here with a class like `Tracker` in tracker, and a line in TRACKERS in build.
"""
