"""Predicted masks: metrics over whole sets, baselines beside them, and the evaluator of the next mask."""
