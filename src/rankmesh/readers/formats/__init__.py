"""Formats: the configs and commands of each framework, and the arguments of a recipe that they set."""
