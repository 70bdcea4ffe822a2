"""What a trained model is worth: evaluators of a run, and protocols for finished encoders."""
