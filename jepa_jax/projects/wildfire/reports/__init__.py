"""Predicted masks in the report of a run: figures beside baselines, a spread as animation, best and worst fires."""
