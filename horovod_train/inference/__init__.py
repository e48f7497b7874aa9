"""Uses a trained model: evaluate, predict, export."""
