"""Recordings of a hang: which ranks diverged, in which group, at which call. No torch, and no code of a file is run.

```
files ── reader, columns ──> Recording ── folder ──> one a rank ─┐
texts ── watchdog, ras, stacks, failures, nccl ──> Line ── lines ┴─> history ──> tracks of each group
tracks ── waits ──> who waits for whom ── order, roots ──> causes ── diagnosis ──> report
```
"""

from rankmesh.debug.doctor.causes import CAUSES, Cause
from rankmesh.debug.doctor.diagnosis import Diagnosis, diagnose, doctor
from rankmesh.debug.doctor.recording import Recording, recording_of
from rankmesh.errors import RecordingError

__all__ = [
    "CAUSES",
    "Cause",
    "Diagnosis",
    "Recording",
    "RecordingError",
    "diagnose",
    "doctor",
    "recording_of",
]
