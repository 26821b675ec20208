"""Tools around the readers: findings of ``rankmesh lint``, commands of containers, lines of Slurm."""
