"""Subcommands of the panel Debug of the help, one in each module: its function ``command``."""
