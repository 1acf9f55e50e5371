"""An emulated cluster: namespaces as nodes, shaped links, real torchrun inside.

    from megatron.efa.emulate.cluster import EmulatedCluster
    from megatron.efa.emulate.rate import parse_rate

    with EmulatedCluster(nodes=2, rate=parse_rate("1gbit")) as cluster:
        cluster.run(1, ["python", "-c", "..."])     # a command on node 1
        cluster.set_rate(1, parse_rate("100mbit"))  # a slow link
        cluster.counters()                          # bytes that crossed each node's link

`job.run_job` starts a training job on such a cluster; `megatron-efa emulate` is its command line.
"""
