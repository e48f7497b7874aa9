"""The command `explain`: what happened to a run, from the files that its ranks have left, and what to do next."""
