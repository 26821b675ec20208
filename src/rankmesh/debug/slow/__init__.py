"""A job that is slow: which rank, host or group the others wait for, how long, and why. No torch."""

from rankmesh.debug.slow.report import CAUSES, FILE, Finding, SlowReport, duration

__all__ = ["CAUSES", "FILE", "Finding", "SlowReport", "duration"]
