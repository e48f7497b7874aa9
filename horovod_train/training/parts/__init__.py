"""What a model is trained with: losses, metrics, callbacks, first weights, which weights are trained and how fast."""
