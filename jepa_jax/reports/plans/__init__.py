"""Pages of plans: one config on some GPUs, and a ladder of sizes."""
