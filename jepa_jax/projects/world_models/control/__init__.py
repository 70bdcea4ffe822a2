"""Environments, energies, planners, and episodes in which they meet."""
