"""Trains a model. run opens a run and loops over steps and hooks, build makes its parts, steps.step is one step."""
