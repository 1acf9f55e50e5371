"""Processes of a job meet over TCP; who does not come, or goes, is known and holds up nobody."""

import socket
import threading
import time

import pytest

from megatron.efa.doctor import gather
from megatron.efa.doctor.gather import HeadLost, Meeting, Place, place
from megatron.efa.emulate.job import free_port
from megatron.efa.errors import EfaError


def test_torchrun_tells_the_place_and_the_port_above_its_own_is_taken():
    told = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8",
            "MASTER_ADDR": "a", "MASTER_PORT": "1000", "TORCHELASTIC_RUN_ID": "j"}  # fmt: skip
    here = place(told)
    assert here == Place(9, 16, 1, 8, "a", 1001, "j")
    assert (here.node, here.nodes) == (1, 2)


def test_srun_tells_the_place_in_a_step_but_not_in_the_batch_script():
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "gpu[03-06]"}
    assert place(batch) is None
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "4",
            "SLURM_LOCALID": "0", "SLURM_PROCID": "2"}  # fmt: skip
    assert place(batch | step) == Place(2, 4, 0, 1, "gpu03", 29501, "7")


def test_kubeflow_tells_the_place():
    told = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "h", "PET_MASTER_PORT": "5"}
    assert place(told) == Place(1, 2, 0, 1, "h", 6)


def test_outside_a_job_there_is_no_place_and_nonsense_is_refused():
    assert place({}) is None
    with pytest.raises(EfaError, match="place"):
        place({"RANK": "one", "WORLD_SIZE": "2"})


class Job:
    """`world` members in threads; `run(rank, meeting)` gives each one's result."""

    def __init__(self, world, run, wait=5.0, absent=(), jobs=None, locals_=1):
        self.port, self.results, self.errors = free_port(), {}, {}
        self.threads = [
            threading.Thread(target=self.member, args=(rank, world, run, wait, jobs or {}, locals_))
            for rank in range(world)
            if rank not in absent
        ]
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.threads)

    def member(self, rank, world, run, wait, jobs, locals_):
        here = Place(
            rank, world, rank % locals_, locals_, "127.0.0.1", self.port, jobs.get(rank, "j")
        )
        try:
            with Meeting(here, f"host{rank // locals_}", wait) as meeting:
                self.results[rank] = run(rank, meeting)
        except EfaError as error:
            self.errors[rank] = error


def test_everybody_gets_what_everybody_gave_however_large():
    def run(rank, meeting):
        return meeting.exchange("x" * 300_000 * rank, 30), meeting.exchange(rank, 30)

    job = Job(4, run)
    assert not job.errors
    for large, small in job.results.values():
        assert {rank: len(text) for rank, text in large.items()} == {
            r: 300_000 * r for r in range(4)
        }
        assert small == {r: r for r in range(4)}


def test_only_the_head_gets_what_is_gathered():
    job = Job(3, lambda rank, meeting: meeting.gather(rank, 30))
    assert job.results == {0: {0: 0, 1: 1, 2: 2}, 1: {}, 2: {}}


def test_all_know_names_and_ranks_of_each_node():
    job = Job(4, lambda rank, meeting: (meeting.names, meeting.nodes()), locals_=2)
    names = {0: "host0", 1: "host0", 2: "host1", 3: "host1"}
    assert all(result == (names, {0: [0, 1], 1: [2, 3]}) for result in job.results.values())


def test_who_does_not_come_is_missing_for_all_and_the_others_go_on():
    job = Job(4, lambda rank, m: (m.missing, m.exchange(rank, 30)), wait=3.0, absent=[2])
    assert set(job.results) == {0, 1, 3}
    assert all(result == ([2], {0: 0, 1: 1, 3: 3}) for result in job.results.values())


def test_who_goes_in_the_middle_is_missing_at_the_next_exchange():
    def run(rank, meeting):
        meeting.exchange(None, 30)
        if rank == 1:
            return None
        return meeting.exchange(rank, 30), meeting.missing

    job = Job(3, run)
    assert job.results[0] == job.results[2] == ({0: 0, 2: 2}, [1])


def test_who_is_too_slow_is_left_behind_and_told_so():
    waited = threading.Event()

    def run(rank, meeting):
        if rank == 1:
            waited.wait(30)
        given = meeting.exchange(rank, 0.5)
        if rank == 0:
            waited.set()
        return given

    job = Job(2, run)
    assert job.results[0] == {0: 0}
    assert isinstance(job.errors[1], HeadLost)
    assert "without rank 1" in str(job.errors[1])


def test_members_wait_for_a_head_that_is_late_itself(monkeypatch):
    monkeypatch.setattr(gather, "_SLACK_S", 1.0)

    def run(rank, meeting):
        if rank == 0:
            time.sleep(2.0)  # the whole time that it has; then it waits for rank 2 as long again
        if rank == 2:
            time.sleep(4.5)
        return meeting.exchange(rank, 2.0)

    job = Job(3, run)
    assert job.results[1] == {0: 0, 1: 1}


def test_a_process_of_another_job_does_not_get_in():
    job = Job(3, lambda rank, meeting: meeting.present, wait=3.0, jobs={2: "another"})
    assert job.results[0] == job.results[1] == [0, 1]
    assert isinstance(job.errors[2], HeadLost)


def test_a_head_that_is_not_there_is_named_with_address_and_port():
    here = Place(1, 2, 0, 1, "127.0.0.1", free_port())
    with pytest.raises(HeadLost, match=f"127.0.0.1 port {here.port} within 0 s"):
        Meeting(here, "host1", 0.3)


def test_a_port_in_use_is_named_with_the_option_that_gives_another():
    with socket.create_server(("", 0)) as taken:
        here = Place(0, 2, 0, 1, "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(EfaError, match=rf"port {here.port}.*--port"):
            Meeting(here, "host0", 0.3)
