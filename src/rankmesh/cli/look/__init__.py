"""Subcommands of the panel Look of the help, one in each module: its function ``command``."""
