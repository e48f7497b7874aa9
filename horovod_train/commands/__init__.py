"""One file or folder for each command of the command line except training."""
