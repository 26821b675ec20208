"""Live groups looked at: the doctor of recordings, the watch of a running job, verification of every group."""
