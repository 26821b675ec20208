"""Guard: a job that notices when ranks which must hold the same hold something else."""

from rankmesh.guard.guard import Guard

__all__ = ["Guard"]
