"""Gloo ranks forked from the test process, to run functions on: a job without torchrun."""

import queue
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

CONTEXT = mp.get_context("fork")


def serve(rank, ranks, store, tasks, answers):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    for task, arguments in iter(tasks.get, None):
        try:
            answers.put((rank, True, task(rank, *arguments)))
        except BaseException:
            answers.put((rank, False, traceback.format_exc()))
    dist.destroy_process_group()


class GlooRanks:
    """Calls `ranks(task, *arguments)`: the list of what `task(rank, *arguments)` returned.

    Ranks are forked at the first call; after a failure the others may wait for the one that failed
    for ever, so all are ended and the next call forks new ones.
    """

    def __init__(self, ranks, directory):
        self.ranks, self.directory, self.starts, self.processes = ranks, directory, 0, []

    def start(self):
        self.starts += 1
        self.tasks = [CONTEXT.Queue() for _ in range(self.ranks)]
        self.answers = CONTEXT.Queue()
        store = self.directory / f"store{self.starts}"
        for rank in range(self.ranks):
            arguments = (rank, self.ranks, store, self.tasks[rank], self.answers)
            process = CONTEXT.Process(target=serve, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)

    def __call__(self, task, *arguments):
        if not self.processes:
            self.start()
        for waiting in self.tasks:
            waiting.put((task, arguments))
        results = {}
        while len(results) < self.ranks:
            try:
                rank, good, result = self.answers.get(timeout=180)
            except queue.Empty:
                good, result = False, f"no answer but from ranks {sorted(results)}"
            if not good:
                self.end()
                pytest.fail(f"rank {rank}:\n{result}")
            results[rank] = result
        return [results[rank] for rank in range(self.ranks)]

    def close(self):
        if self.processes:
            for waiting in self.tasks:
                waiting.put(None)
            for process in self.processes:
                process.join(30)
        self.end()

    def end(self):
        for process in self.processes:
            process.kill()
        self.processes = []
