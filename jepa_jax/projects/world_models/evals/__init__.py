"""What a world model is worth: control and prediction, beside baselines."""
