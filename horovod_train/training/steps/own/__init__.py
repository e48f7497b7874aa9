"""Models that say themselves what a step is: train_step, test_step, compute_loss, compute_metrics of a keras.Model.

Such a method is called in the compiled step, as Keras' `fit` and `evaluate` do; what is around it stays the trainer's.
"""
