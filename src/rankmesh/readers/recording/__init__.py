"""Launch scripts that are run with stand-ins for their launchers."""
