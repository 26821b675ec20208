"""Transfers live: run over a process group. Loads torch."""
