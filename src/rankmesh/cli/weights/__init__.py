"""Subcommands of the panel Weights of the help, one in each module: its function ``command``."""
