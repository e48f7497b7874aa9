"""The settings of a run: types, defaults, rules between settings, reading, names. Standard library and yaml only."""
