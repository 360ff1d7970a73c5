"""Starts the ranks of a development run on this machine, or joins ranks that torchrun started.

Under torchrun the process group outlives a run: several runs share it, one after the other.
Without CUDA the ranks are forked, so that torch and Megatron are imported once; with CUDA they
are spawned, because a CUDA context does not survive a fork.
"""

import atexit
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from psrl.backend.train.pipe import Pipeline, pipeline_groups
from psrl.core.cost.cluster import ParallelConfig
from psrl.core.errors import BackendError, PsrlError

from .compat import parallel_state
from .options import TIMEOUT_S

# A collective operation outlives the run's own limit, which has the better message.
_GRACE_S = 60.0
# After a first failure, how long to wait for messages that may name its cause.
_BLAME_S = 10.0
# How long a rank that has sent its result may take to leave the group.
_LEAVE_S = 10.0
# Of Linux' prctl.
_PR_SET_PDEATHSIG = 1


def in_torchrun() -> bool:
    """Whether torchrun, or a scheduler that sets its variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_process() -> bool:
    """Whether this process starts the ranks, or is rank 0 under torchrun."""
    return not in_torchrun() or os.environ["RANK"] == "0"


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Run `function(*arguments)` on every rank of a new process group; returns their results.

    Under torchrun the calling process is one of the ranks, and only its own result is returned;
    all ranks must make the same calls in the same order, and a failed call ends the process.
    Otherwise `world_size` processes are started here. The first rank that fails stops the others.

    Args:
        timeout_s: limit for the whole run; under torchrun, for each collective operation of the
            default group, as the first run sets it.

    Raises:
        PsrlError: the error of the first rank that failed, if it is one for users.
        BackendError: if a rank failed otherwise, died, or the time is over.
    """
    if in_torchrun():
        return [_run_joined(function, world_size, arguments, timeout_s)]
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    with tempfile.TemporaryDirectory(prefix="psrl-ranks-") as directory:
        rendezvous = f"file://{Path(directory) / 'rendezvous'}"
        receivers, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_child,
                args=(
                    sender,
                    os.getpid(),
                    rank,
                    world_size,
                    rendezvous,
                    timeout_s,
                    function,
                    arguments,
                ),
                daemon=True,
            )
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        try:
            results = _collect(receivers, time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            # Ranks that wait for the failed one in a collective would wait until its timeout.
            for process in processes:
                process.kill()
            raise
        finally:
            for process in processes:
                process.join(_LEAVE_S)
                process.kill()
                process.join()
        return results


def _run_joined(
    function: Callable[..., Any], world_size: int, arguments: tuple[Any, ...], timeout_s: float
) -> Any:
    found = int(os.environ["WORLD_SIZE"])
    if found != world_size:
        raise BackendError(
            f"torchrun started {found} processes, the plan needs {world_size}",
            f"use torchrun with {world_size} processes in all",
        )
    die_with_parent(os.getppid())
    if not dist.is_initialized():
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        _join_group(local_rank, timeout_s, init_method="env://")
        atexit.register(dist.destroy_process_group)
    try:
        result = function(*arguments)
    except BaseException:
        # Leaving would wait for ranks that wait for this one; torchrun stops them.
        atexit.unregister(dist.destroy_process_group)
        raise
    # Nobody starts the next run while another is still in this one.
    dist.barrier()
    return result


def die_with_parent(parent: int) -> None:
    """Let this process be killed when its parent ends, however that ends.

    A rank whose launcher is gone would hold its device and go on writing.

    Args:
        parent: process id of the parent, which may have ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


class _Success(NamedTuple):
    result: Any


class _Failure(NamedTuple):
    rank: int
    time_s: float
    error: PsrlError


def _child(
    sender: Connection,
    launcher: int,
    rank: int,
    world_size: int,
    rendezvous: str,
    timeout_s: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    group = {"init_method": rendezvous, "rank": rank, "world_size": world_size}
    message: _Success | _Failure
    die_with_parent(launcher)
    # The launcher hears signals, says so and ends the ranks; it may have forked its handlers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _join_group(rank, timeout_s + _GRACE_S, **group)
        message = _Success(function(*arguments))
    except PsrlError as error:
        message = _Failure(rank, time.monotonic(), error)
    except Exception:
        text = traceback.format_exc()
        message = _Failure(rank, time.monotonic(), BackendError(f"rank {rank} failed:\n{text}"))
    # As bytes: in an object, a tensor would only be a handle that dies with this process.
    sender.send_bytes(pickle.dumps(message))
    # Leaving the group makes the others fail, so a rank leaves only after success.
    if isinstance(message, _Success):
        dist.destroy_process_group()


def _join_group(local_rank: int, timeout_s: float, **group: Any) -> None:
    # Ranks share the cores of one machine; more threads each would only wait for one another.
    torch.set_num_threads(1)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **group)


def _collect(receivers: list[Any], deadline: float, timeout_s: float) -> list[Any]:
    """Results of all ranks, or the error of the rank that failed first."""
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for receiver in ready:
            rank = waiting.pop(receiver)
            message = _receive(receiver, rank)
            if isinstance(message, _Failure):
                # The others fail too when a rank leaves the group: hear all, to blame the first.
                deadline = min(deadline, time.monotonic() + _BLAME_S)
                failures.append(message)
            else:
                results[rank] = message.result
    if failures:
        raise min(failures, key=lambda f: (f.time_s, f.rank)).error
    if waiting:
        raise BackendError(
            f"ranks {sorted(waiting.values())} did not finish within {timeout_s:g} s",
            "raise the timeout, or look for a hang: all ranks must run the same collectives",
        )
    return [results[rank] for rank in range(len(receivers))]


def _receive(receiver: Any, rank: int) -> "_Success | _Failure":
    try:
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        hint = "out of memory? see the kernel's log"
        # It fell silent before anyone else could fail because of it.
        return _Failure(rank, 0.0, BackendError(f"rank {rank} died without a message", hint))


@contextmanager
def model_parallel(parallel: ParallelConfig, timeout_s: float = TIMEOUT_S) -> Iterator[Pipeline]:
    """Megatron's process groups, and those of the messages between stages.

    The default process group must exist. Yields the pipeline that this process belongs to.

    Args:
        timeout_s: limit for the run; a collective operation or a message may take little longer.

    Raises:
        BackendError: if the number of processes does not match.
    """
    tp, pp, dp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.data_parallel_size,
    )
    if dist.get_world_size() != parallel.world_size:
        raise BackendError(
            f"the plan needs tensor({tp}) * pipeline({pp}) * data({dp}) = {parallel.world_size} "
            f"processes, {dist.get_world_size()} are running",
            f"start {parallel.world_size} processes, or plan for {dist.get_world_size()} devices",
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=(timeout_s + _GRACE_S) / 60,
    )
    try:
        with pipeline_groups(parallel, timeout_s + _GRACE_S) as pipeline:
            yield pipeline
    finally:
        parallel_state.destroy_model_parallel()
