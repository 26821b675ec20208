"""Subcommands of the panel Run of the help, one in each module: its function ``command``."""
