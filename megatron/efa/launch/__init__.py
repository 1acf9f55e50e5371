"""From a config to a running job: rendered for a scheduler, started, restarted, and looked at.

cli  ->  job (what is to run)  ->  slurm | kubernetes | torchrun | emulated (files)  ->  record
On the nodes: loop.sh (attempts)  ->  node (one a node)  ->  elastic (torchrun)  ->  ranks
"""
