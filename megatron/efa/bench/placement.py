"""`megatron-efa bench placement`: our order of hosts beside those by name, by tree and by chance.

On synthetic clusters of fragmented capacity: a network of four layers whose bottom switches hold
unequal numbers of a job's hosts, whose names say nothing of where they are. Each order's traffic x
distance is given as a multiple of a bound that no order can go below, so 1.00 would be the optimum.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron.efa.cluster import search
from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.cluster.place import place
from megatron.efa.cluster.traffic import Sizes, Traffic
from megatron.efa.emulate import report
from megatron.efa.errors import EfaError

GPUS = 8
_KIMI_K2 = {  # config.json of moonshotai/Kimi-K2-Base; heads of 192 as Megatron counts them
    "num_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "kv_channels": 192,
    "num_experts": 384,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 2048,
    "expert_tensor_parallel_size": 1,
}
_LLAMA_70B = {  # config.json of meta-llama/Llama-3.1-70B
    "num_layers": 80,
    "hidden_size": 8192,
    "ffn_hidden_size": 28672,
    "num_attention_heads": 64,
    "num_query_groups": 8,
}
JOBS: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "1T MoE, TP8 PP8 EP32": (_KIMI_K2, 8, 8, 32),
    "1T MoE, TP1 PP4 EP64": (_KIMI_K2, 1, 4, 64),
    "1T MoE, TP1 PP16 EP8": (_KIMI_K2, 1, 16, 8),
    "70B dense, TP8 PP16": (_LLAMA_70B, 8, 16, 1),
    "70B dense, TP8 PP1": (_LLAMA_70B, 8, 1, 1),
}
"""Name -> model, TP, PP, EP."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megatron-efa bench placement`."""
    option = parser.add_argument
    option("--nodes", default="128,512", help="sizes of clusters (default: 128,512)")
    option("--clusters", type=int, default=5, help="clusters of each size (default: 5)")
    option("--json", type=Path, help="write all figures to this file")


def run(args: argparse.Namespace) -> int:
    """Print a table; returns 0. Raises EfaError for a number of nodes that jobs do not fit."""
    sizes = [_nodes(word) for word in args.nodes.split(",") if word]
    if args.clusters < 1:
        raise EfaError(f"--clusters {args.clusters} is not 1 or more")
    records = []
    print(f"traffic x distance as a multiple of a lower bound, median of {args.clusters} clusters")
    print(f"{'nodes':7}{'job':24}{'random':>8}{'name':>8}{'tree':>8}{'ours':>8}{'seconds':>9}")
    for nodes in sizes:
        for job in JOBS:
            found = [
                compare(fragmented(nodes, seed), job_sizes(job)) for seed in range(args.clusters)
            ]
            middle = {key: statistics.median(one[key] for one in found) for key in found[0]}
            shown = "".join(f"{middle[key]:8.2f}" for key in ("random", "name", "tree", "ours"))
            print(f"{nodes:<7}{job:24}{shown}{middle['seconds']:9.2f}", flush=True)
            records.append({"nodes": nodes, "job": job, "clusters": found})
    if args.json is not None:
        report.write_json(args.json, {"placement": records})
    return 0


def job_sizes(name: str) -> Sizes:
    """Sizes of a job of `JOBS`, with 16 million tokens a step."""
    model, tp, pp, ep = JOBS[name]
    return Sizes(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        global_batch_size=4096,
        **model,
    )


def fragmented(nodes: int, seed: int) -> Cluster:
    """Hosts under bottom switches of 1 to 13 of them, in a tree of four layers, named by chance."""
    dice = random.Random(seed)
    paths: list[tuple[str, ...]] = []
    leaf = 0
    while len(paths) < nodes:
        top, middle, low = dice.randrange(2), dice.randrange(3), dice.randrange(3)
        path = ("root", f"{top}", f"{top}.{middle}", f"{top}.{middle}.{low}.{leaf}")
        paths += [path] * dice.randint(1, 13)
        leaf += 1
    del paths[nodes:]
    dice.shuffle(paths)
    return Cluster(tuple(Node(f"host{i:04}", GPUS, path) for i, path in enumerate(paths)))


def compare(cluster: Cluster, sizes: Sizes) -> dict[str, float]:
    """Return traffic x distance of each order over the bound, and the seconds that ours took."""
    start = time.perf_counter()
    placement = place(cluster, sizes)
    seconds = time.perf_counter() - start
    parts = Traffic(sizes, cluster.world_size).between_nodes(GPUS).values()
    weight = np.sum(list(parts), axis=0)
    nodes = cluster.nodes
    paths = [node.path for node in nodes]
    distance = search.distances(paths)
    floor = lower_bound(weight, paths)
    index = {node.name: i for i, node in enumerate(nodes)}
    count = list(range(len(nodes)))
    by_chance = [random.Random(seed).sample(count, len(count)) for seed in range(20)]
    orders = {
        "name": sorted(count, key=lambda i: nodes[i].name),
        "tree": sorted(count, key=lambda i: (paths[i], nodes[i].name)),
        "ours": [index[node.name] for node in placement.after.nodes],
    }
    ratios = {k: search.cost(weight, distance, np.array(o)) / floor for k, o in orders.items()}
    chance = [search.cost(weight, distance, np.array(order)) / floor for order in by_chance]
    return ratios | {"random": min(chance), "seconds": seconds}


def lower_bound(weight: np.ndarray, paths: list[tuple[str, ...]]) -> float:
    """No order's traffic x distance is below this. All `paths` are of one length.

    Distance is 1 for any two hosts and 1 more for each layer whose switch they do not share. Under
    a switch with c hosts a place can at best have the c - 1 places that it exchanges most with, so
    what leaves the switch is at least c times what the most self-contained place sends beyond
    those.
    """
    largest_first = -np.sort(-weight, axis=1)
    kept = np.concatenate([np.zeros((len(weight), 1)), np.cumsum(largest_first, axis=1)], axis=1)
    leaving = (weight.sum(1)[:, None] - kept).min(0)  # by c - 1
    total = weight.sum() / 2
    for layer in range(len(paths[0])):
        switches: dict[tuple[str, ...], int] = {}
        for path in paths:
            switches[path[: layer + 1]] = switches.get(path[: layer + 1], 0) + 1
        total += sum(c * max(leaving[c - 1], 0) for c in switches.values()) / 2
    return float(total)


def _nodes(word: str) -> int:
    if not word.isdecimal() or not int(word) or int(word) % 128:
        raise EfaError(f"--nodes: '{word}' is no multiple of 128, which the jobs need")
    return int(word)
