"""Plans and predictions in the report of a run."""
