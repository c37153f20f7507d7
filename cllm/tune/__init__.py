"""Tuning: measure this machine once with this model, and remember the result."""
