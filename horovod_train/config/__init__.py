"""The settings of a run: types and defaults, rules between them, reading, names. Standard library and yaml only."""
