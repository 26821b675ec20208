"""Tests of parallel code: a pytest plugin that runs tests on ranks, random layouts, and the variables of launchers.

```
plugin        @pytest.mark.ranks("tp=2,dp=2"), the fixtures `ranks` and `groups`, --rankmesh=sim|gloo|nccl
strategies    hypothesis: meshes(), views(), plans(), each with its axes and options     (needs hypothesis)
clusters      the variables that launchers set for the ranks of a cluster that is not there
processes     ranks that are processes: started from a process that has loaded torch once
```

The plugin is found by pytest where rankmesh is installed; it loads torch when the first test runs on ranks.
"""

from rankmesh.testing.clusters import environment

__all__ = ["environment"]
