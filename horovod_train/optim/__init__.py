"""Optimizers by name, learning rate schedules, LARS."""
