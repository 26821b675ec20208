"""The cluster of a job: its hosts and the levels around them, as data. What they cost is in `rankmesh.placement`."""
