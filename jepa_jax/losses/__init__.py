"""Losses: pure functions of arrays that return a scalar and its named terms."""
