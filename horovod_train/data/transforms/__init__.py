"""Turns stored values into what the model gets: decodes, augments, casts and scales. Start with transforms."""
