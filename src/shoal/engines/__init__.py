"""Where processes are started, and how they ended.

An engine starts the workers of a run and says when each one ends; it does not know what they compute. `local` forks
them on this machine from a zygote, and `look` tells what has become of one that is silent. `world` reads who this
process is when another launcher (torchrun, Slurm) has already started one process per worker. `lifeline` ties a child's
life to its parent's.
"""
