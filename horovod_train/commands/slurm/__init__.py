"""The command `slurm`: prints a batch script for a config, ready for sbatch, and says what it chose. No TensorFlow."""
