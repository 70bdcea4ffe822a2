"""Encoders of small frames, and predictors of what follows a latent and an action."""
