"""A trained model: evaluate, predict, export."""
