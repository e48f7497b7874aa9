"""Trains a model. run.py opens the parts, build.py makes them, loop.py runs steps and hooks, step.py is one step."""
