"""Four actors of Ray that run a job that survives: ``python ray_actors.py JOB PORT``; what each returned."""

import os
import runpy
import sys

import ray

from rankmesh.launch.table import torchrun_variables


@ray.remote(num_cpus=0.5)
class Member:
    """One process of the job."""

    def run(self, job, variables):
        """What the job's ``survive`` returned here."""
        os.environ.update(variables)
        return runpy.run_path(job)["result"]


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    started = []
    for rank in range(4):
        variables = torchrun_variables(rank, 4, local_rank=rank, local_world_size=4, port=int(sys.argv[2]))
        started.append(Member.remote().run.remote(sys.argv[1], variables))
    for rank, member in enumerate(started):
        try:
            sys.stdout.write(f"survived {rank} {ray.get(member)}\n")
        except ray.exceptions.RayActorError as error:  # noqa: PERF203  - of each actor
            sys.stdout.write(f"lost {rank} {type(error).__name__}\n")
