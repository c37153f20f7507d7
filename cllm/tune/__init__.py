"""Measure this machine once with this model, and remember the answer."""
