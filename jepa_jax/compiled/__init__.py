"""Reads compiled programs: their instructions, and what each kernel multiplies, computes and moves."""
