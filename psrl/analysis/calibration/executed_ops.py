"""The ops of several executed runs as one list of measurements, and what a cost model says."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from psrl.core.cost.calibrated_cost_model import CalibratedCostModel
from psrl.core.cost.calibration import Calibration, Coefficients, Domain
from psrl.core.cost.cluster import DeviceSpec
from psrl.core.errors import ConfigError
from psrl.core.plan.plan import Plan
from psrl.core.run.events import GRADIENT_REDUCTION
from psrl.core.samples.sample import FloatArray, IntArray, StrArray

from .executed_runs import ExecutedRun


@dataclass(frozen=True)
class ExecutedOps:
    """The ops of all runs as one list of measurements.

    Raises:
        ConfigError: if the runs have different devices or working precisions.
    """

    runs: tuple[ExecutedRun, ...]

    def __post_init__(self) -> None:
        devices = {r.plan.cluster.device for r in self.runs}
        if len(devices) != 1:
            names = ", ".join(sorted(f"{d.name} ({d.dtype_bytes} bytes)" for d in devices))
            raise ConfigError(
                f"the runs were made on {len(devices)} different devices: {names}",
                "calibrate each device and working precision by itself",
            )

    @property
    def device(self) -> DeviceSpec:
        return self.runs[0].plan.cluster.device

    def __len__(self) -> int:
        return sum(len(run.ops) for run in self.runs)

    def rows(self, index: IntArray) -> "ExecutedOps":
        """The chosen rows, in ascending order, of all runs together."""
        ends = np.cumsum([len(run.ops) for run in self.runs])
        parts = np.split(index, np.searchsorted(index, ends[:-1]))
        return ExecutedOps(
            tuple(
                replace(run, ops=run.ops.rows(part - (end - len(run.ops))))
                for run, part, end in zip(self.runs, parts, ends.tolist(), strict=True)
            )
        )

    @cached_property
    def measured_s(self) -> FloatArray:
        """[rows] time of every op."""
        return np.concatenate([run.ops.measured_s for run in self.runs])

    @cached_property
    def op_name(self) -> StrArray:
        """[rows] phase and kind of every op."""
        parts = [np.char.add(np.char.add(r.ops.phase, " "), r.ops.op) for r in self.runs]
        return np.concatenate(parts)

    @cached_property
    def run_name(self) -> StrArray:
        """[rows] run of every op."""
        return np.repeat([run.name for run in self.runs], [len(run.ops) for run in self.runs])

    @cached_property
    def micro_batch_keys(self) -> list[tuple[int, int, int, int]]:
        """[rows] (run, program, rank, micro-batch): forward-only phases repeat the same ones."""
        return [
            (number, *key)
            for number, run in enumerate(self.runs)
            for key in zip(
                run.ops.program.tolist(),
                run.ops.rank.tolist(),
                run.ops.micro_batch.tolist(),
                strict=True,
            )
        ]

    @property
    def fastest_layer_s(self) -> float:
        """Shortest time that an op spent per layer."""
        return min(
            float(run.ops.measured_s.min())
            * run.plan.parallel.pipeline_model_parallel_size
            / run.plan.model.num_layers
            for run in self.runs
            if len(run.ops)
        )

    def predict_s(self, coefficients: Coefficients) -> FloatArray:
        """[rows] seconds of every op."""
        return np.concatenate([_predict_run_s(run, coefficients) for run in self.runs])

    def phase_times(self, phase: str, predicted_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Predicted and measured busy seconds of a phase, one value per (run, rank, stage)."""
        number = np.repeat(np.arange(len(self.runs)), [len(run.ops) for run in self.runs])
        rank, stage, phases = (
            np.concatenate([getattr(run.ops, name) for run in self.runs])
            for name in ("rank", "stage", "phase")
        )
        mine = phases == phase
        workers = np.stack([number[mine], rank[mine], stage[mine]], axis=1)
        distinct, worker = np.unique(workers, axis=0, return_inverse=True)
        predicted, measured = (
            np.bincount(worker.ravel(), values[mine], len(distinct)).astype(np.float64)
            for values in (predicted_s, self.measured_s)
        )
        return predicted, measured

    def step_times(self, kind: str) -> tuple[IntArray, FloatArray]:
        """Run and seconds of every optimizer step or gradient reduction of several ranks.

        The fastest rank's time counts: the others wait for the last one to arrive.
        """
        numbers, times = [], []
        for number, run in enumerate(self.runs):
            events = run.steps.where(run.steps.op == kind)
            if kind == GRADIENT_REDUCTION and run.plan.num_ranks == 1:
                continue
            for program in np.unique(events.program).tolist():
                mine = events.where(events.program == program)
                numbers.append(number)
                times.append(float((mine.end_s - mine.start_s).min()))
        return np.array(numbers, np.int64), np.array(times, np.float64)

    def domain_values(self) -> dict[str, FloatArray]:
        """What was measured, by the names of `Domain.ranges`."""
        tokens, pairs = (
            np.concatenate([getattr(run.ops, name) for run in self.runs])
            for name in ("num_tokens", "pairs")
        )
        plans = [run.plan for run in self.runs]
        parallel = [plan.parallel for plan in plans]
        values: dict[str, list[int]] = {
            "hidden_size": [plan.model.hidden_size for plan in plans],
            "layers_per_stage": [
                plan.model.num_layers // plan.parallel.pipeline_model_parallel_size
                for plan in plans
            ],
            "tensor_model_parallel_size": [p.tensor_model_parallel_size for p in parallel],
            "pipeline_model_parallel_size": [p.pipeline_model_parallel_size for p in parallel],
            "data_parallel_size": [p.data_parallel_size for p in parallel],
            "num_devices": [p.world_size for p in parallel],
        }
        sizes = {"num_tokens": tokens, "keys_per_query": pairs / np.maximum(tokens, 1.0)}
        return sizes | {name: np.array(v, np.float64) for name, v in values.items()}


def _predict_run_s(run: ExecutedRun, coefficients: Coefficients) -> FloatArray:
    costs, ops = cost_model_of(run.plan, coefficients), run.ops
    predicted_s = np.zeros(len(ops))
    for stage in np.unique(ops.stage).tolist():
        for is_backward in (False, True):
            here = (ops.stage == stage) & ((ops.op == "backward") == is_backward)
            tokens, pairs, head = (x[here] for x in (ops.num_tokens, ops.pairs, ops.head_tokens))
            time_s = costs.stage_backward_s if is_backward else costs.stage_forward_s
            predicted_s[here] = time_s(stage, tokens, pairs, head)
        # Without the host time of an op: layers that run again are none of their own.
        again = (ops.stage == stage) & (ops.recomputes > 0)
        if again.any():
            predicted_s[again] += costs.layers_s(ops.num_tokens[again], ops.pairs[again])
    return predicted_s


def cost_model_of(plan: Plan, coefficients: Coefficients) -> CalibratedCostModel:
    """A cost model with these coefficients and nothing else measured."""
    device = plan.cluster.device
    domain = Domain(device=device.name, dtype_bytes=device.dtype_bytes, attention="tree", ranges={})
    calibration = Calibration(sources=(), coefficients=coefficients, domain=domain)
    return CalibratedCostModel(plan.model, plan.cluster, plan.parallel, calibration)
