"""One file or folder for each command of the command line, but training."""
