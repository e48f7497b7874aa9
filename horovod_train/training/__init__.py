"""Trains a model. run opens the parts, build makes them, loop runs steps and hooks, steps.step is one step."""
