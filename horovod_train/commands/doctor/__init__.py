"""The command `doctor`: checks whether this machine, or this job, is fit to train on. One line per check."""
