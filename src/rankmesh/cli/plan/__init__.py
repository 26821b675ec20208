"""Subcommands of the panel Plan of the help, one in each module: its function ``command``."""
