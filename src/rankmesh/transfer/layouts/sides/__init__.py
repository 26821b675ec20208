"""Sides: frameworks that construct and load a model themselves, each run as every rank in turn."""
