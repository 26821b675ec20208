"""Tools around the readers: findings of ``rankmesh lint``, their fixes, commands of containers, lines of Slurm."""
